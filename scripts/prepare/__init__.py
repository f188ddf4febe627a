"""Commands that prepare published texts, or your own, for fairseq."""
