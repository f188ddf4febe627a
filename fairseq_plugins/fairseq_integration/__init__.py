"""What works around fairseq, for all rooms: it uses none of them.

docs/fairseq.md lists what is changed in fairseq, and why.
"""
