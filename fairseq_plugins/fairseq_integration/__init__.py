"""Work-arounds for fairseq, which all rooms use.

docs/fairseq.md lists what they change in fairseq, and why.
"""
