"""Weighted Transformer (Ahmed et al. 2017, arXiv:1711.02132)."""
