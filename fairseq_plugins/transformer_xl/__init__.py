"""Transformer-XL: language models with relative positions, and the models of its ablations.

Dai et al. 2019 (arXiv:1901.02860). Recurrence and attention are in ``segment_language_model``.
"""

from fairseq_plugins.fairseq_integration.registration import register_with_room

<<<<<<< HEAD
if HAS_FAIRSEQ:
    from fairseq_plugins.transformer_xl.model import TransformerXLConfig, TransformerXLLanguageModel
else:
    __getattr__ = refuse_without_fairseq(__name__)

__all__ = [
    "LockedDropout",
    "TransformerXLConfig",
    "TransformerXLLanguageModel",
    "WordDropout",
]
=======
REGISTERS = ("model",)

register_with_room()
>>>>>>> main
