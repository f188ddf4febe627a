"""Workarounds for fairseq that all rooms (the subpackages with models) share.

docs/fairseq.md lists what they change in fairseq, and why.
"""
