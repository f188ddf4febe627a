"""Losses that fairseq can name."""
