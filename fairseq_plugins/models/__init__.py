"""Models that fairseq can name: one file a paper, with its citation, assembly and presets."""
