"""A trained model on a device, and what fairseq's generator finds with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask

from fairseq_plugins.python_interface.text import TextCoder

METHODS = ("score", "stream", "generate", "translate")


class Hypothesis(NamedTuple):
    """A continuation or translation that fairseq's generator found.

    Attributes:
        text: the text.
        score: by which fairseq ranks hypotheses: the sum of ``log_probs`` over their number to the
            power of the length penalty, so with a penalty of 1 their mean.
        tokens: the symbols.
        log_probs: of the symbols and of the ``</s>`` that ends them, in nats, float32; the last is
            0 where nothing but the length ends them.
    """

    text: str
    score: float
    tokens: list[str]
    log_probs: np.ndarray


class LoadedModel:
    """A trained model with its task, on a device.

    Args:
        model: ready for inference.
        task: fairseq's, with the dictionaries.

    Attributes:
        model: a ``torch.nn.Module``.
    """

    _does = ""

    def __init__(self, model: BaseFairseqModel, task: FairseqTask) -> None:
        self.model = model
        self.task = task

    @property
    def device(self) -> torch.device:
        """Return where the model computes."""
        return next(self.model.parameters()).device

    def to(self, *args: Any, **kwargs: Any) -> LoadedModel:
        """Move the model to a device, such as "cuda", or cast it, as ``torch.nn.Module.to``."""
        self.model.to(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in METHODS:
            there = ", ".join(f".{method}" for method in METHODS if hasattr(type(self), method))
            message = f"{self._does}, and has no .{name}: there are {there}"
        raise AttributeError(message)


def hypotheses(text: TextCoder, found: list[dict[str, Any]]) -> list[Hypothesis]:
    """Return what fairseq's generator found for one text, in the order that it has."""
    made = []
    for one in found:
        # the last token only ends it
        tokens, log_probs = one["tokens"][:-1].cpu(), one["positional_scores"].float().cpu()
        made.append(
            Hypothesis(
                text.decode(tokens), float(one["score"]), text.symbols(tokens), log_probs.numpy()
            )
        )
    return made
