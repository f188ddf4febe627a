"""Transformer-XL: language models with relative positions, and the paper's ablations.

Dai et al. 2019 (arXiv:1901.02860). Recurrence and attention are in ``segment_language_model``.
"""
