"""Workarounds for fairseq that all subpackages with models share.

docs/fairseq.md lists what they change in fairseq, and why.
"""
