"""Trained models from Python: ``load`` one, score, generate, stream and translate.

Begin with :mod:`.loading`.
"""

from fairseq_plugins.python_interface.language_model import LanguageModel, TextStream
from fairseq_plugins.python_interface.loaded_model import Hypothesis
from fairseq_plugins.python_interface.loading import load
from fairseq_plugins.python_interface.scoring import Score
from fairseq_plugins.python_interface.translation import TranslationModel

__all__ = ["Hypothesis", "LanguageModel", "Score", "TextStream", "TranslationModel", "load"]
