"""Trained models from Python: ``load`` one, score, generate, stream and translate.

Begin with :mod:`.loading`.
"""

from fairseq_plugins.fairseq_integration.registration import register

register()
