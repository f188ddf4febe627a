"""What works around fairseq: presets, safe loading, precision, optimizers, constraints."""
