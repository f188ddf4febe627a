"""Tasks that fairseq can name."""
