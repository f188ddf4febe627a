"""Trained models from Python: ``load`` one, score, generate, stream and translate.

Begin with :mod:`.loading`.
"""

from fairseq_plugins.fairseq_integration.installed import HAS_FAIRSEQ, refuse_without_fairseq

if HAS_FAIRSEQ:
    from fairseq_plugins.python_interface.language_model import LanguageModel, TextStream
    from fairseq_plugins.python_interface.loaded_model import Hypothesis
    from fairseq_plugins.python_interface.loading import load
    from fairseq_plugins.python_interface.scoring import Score
    from fairseq_plugins.python_interface.translation import TranslationModel
else:
    __getattr__ = refuse_without_fairseq(__name__)

__all__ = ["Hypothesis", "LanguageModel", "Score", "TextStream", "TranslationModel", "load"]
