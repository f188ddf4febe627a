"""Weighted Transformer (Ahmed et al. 2017, arXiv:1711.02132).

Translation with learned weights on the simplex: κ for attention heads and α for slices of the
feed-forward network. ``layers`` has the default reading of the paper, ``as_written_attention`` and
``as_written_layers`` the other.
"""
