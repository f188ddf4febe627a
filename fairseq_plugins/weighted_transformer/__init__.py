"""Weighted Transformer (Ahmed et al. 2017, arXiv:1711.02132): translation with weighted branches.

``layers`` has the default variant of the paper's equations, ``as_written`` the other.
"""
