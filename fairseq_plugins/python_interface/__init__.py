"""Trained models from Python: ``load`` a model, then score, generate, stream or translate."""
