"""Commands that measure trained models."""
