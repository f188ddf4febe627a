"""What all models here need of fairseq: registration, presets, and four changes to fairseq.

docs/fairseq.md lists the changes, and why each is needed.
"""
