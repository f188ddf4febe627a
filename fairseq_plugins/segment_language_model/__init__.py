"""Language models that read parallel streams of text, segment by segment, with recurrence.

Transformer-XL and all-attention share what is here: task, streams, decoder, attention, loss.
"""
