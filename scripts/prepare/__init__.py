"""Commands that make data for fairseq from published and own texts."""
