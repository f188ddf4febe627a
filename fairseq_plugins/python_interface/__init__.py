"""Trained models from Python: ``load`` a model, then score, generate, stream or translate."""

from fairseq_plugins.fairseq_integration.registration import register

register()
