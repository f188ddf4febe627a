"""Language models that read parallel streams of text, segment by segment, with recurrence.

Transformer-XL and all-attention share what is here: task, streams, decoder, attention, loss.
"""

from fairseq_plugins.fairseq_integration.registration import register_with_subpackage

REGISTERS = ("loss", "task")

register_with_subpackage()
