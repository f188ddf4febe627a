"""All-attention: persistent vectors instead of feed-forward layers, and adaptive attention span.

Sukhbaatar et al. 2019 (arXiv:1907.01470 and arXiv:1905.07799).
"""

from fairseq_plugins.fairseq_integration.registration import register_with_subpackage

REGISTERS = ("adagrad_with_clip", "model")

register_with_subpackage()
