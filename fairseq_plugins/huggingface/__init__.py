"""Transformer-XL and all-attention in Hugging Face's transformers; importing this registers them.

``AutoModelForCausalLM.from_pretrained(FOLDER)`` then loads what ``scripts.convert.huggingface``
wrote. Needs ``pip install '.[huggingface]'``, and no fairseq.
"""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fairseq_plugins.huggingface.model import (
    AllAttentionConfig,
    AllAttentionForCausalLM,
    TransformerXLConfig,
    TransformerXLForCausalLM,
)
from fairseq_plugins.huggingface.tokenizer import SUBWORDS, DictionaryTokenizer

__all__ = [
    "SUBWORDS",
    "AllAttentionConfig",
    "AllAttentionForCausalLM",
    "DictionaryTokenizer",
    "TransformerXLConfig",
    "TransformerXLForCausalLM",
]

for _model in (TransformerXLForCausalLM, AllAttentionForCausalLM):
    AutoConfig.register(_model.config_class.model_type, _model.config_class)
    AutoModelForCausalLM.register(_model.config_class, _model)
    AutoTokenizer.register(_model.config_class, DictionaryTokenizer)
