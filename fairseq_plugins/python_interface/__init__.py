"""Trained models from Python: ``load`` one, score, generate, stream and translate.

Begin with :mod:`.loading`.
"""
