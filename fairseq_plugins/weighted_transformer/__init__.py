"""Weighted Transformer (Ahmed et al. 2017, arXiv:1711.02132).

Translation whose attention heads and slices of the feed-forward network have learned weights κ and
α on the simplex. ``layers`` has the default reading of the paper; ``branched_attention`` and
``as_written_layers`` have the other.
"""

from fairseq_plugins.fairseq_integration.registration import register_with_room

REGISTERS = ("model", "optimizer")

register_with_room()
