"""Language models that read parallel streams of text, segment by segment, with recurrence.

Shared by Transformer-XL and all-attention: task, streams, decoder, layer, attention and its kernel.
"""

from fairseq_plugins.fairseq_integration.registration import register_with_room

REGISTERS = ("loss", "task")

register_with_room()
