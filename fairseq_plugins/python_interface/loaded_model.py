"""What language models and translation models from Python have in common.

Shapes: B rows of a batch, T tokens, N tokens of a split.
"""

from __future__ import annotations

import copy
import copyreg
import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.dataclass.constants import ChoiceEnum, StrEnumMeta
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_plugins.python_interface.scoring import score_batches, warn_of_unknown
from fairseq_plugins.python_interface.text import TextCoder
from fairseq_plugins.segment_language_model.streams import load_tokens


def _reduce_choices(choices: StrEnumMeta) -> tuple | str:
    if choices.__name__ != "Choices":
        return choices.__qualname__
    return ChoiceEnum, ([choice.value for choice in choices],)


# the types of fairseq's options, which it makes when it needs them: pickles find no such class
copyreg.pickle(StrEnumMeta, _reduce_choices)


class Hypothesis(NamedTuple):
    """A continuation or translation that fairseq's generator found.

    Attributes:
        text: the text.
        score: the sum of ``log_probs`` over their number to the power of the length penalty.
        tokens: the symbols.
        log_probs: of the symbols and of the ``</s>`` that ends them, in nats, float32; the last is
            0 where nothing but the length ends them.
    """

    text: str
    score: float
    tokens: list[str]
    log_probs: np.ndarray


class Batches(NamedTuple):
    """The batches of a split, and where the tokens of a row stand among those of all rows."""

    batches: Iterable[dict[str, Any]]
    place: Callable[[int], int]


class LoadedModel:
    """A trained model, ready for inference, with fairseq's task, which has the dictionaries."""

    def __init__(self, model: BaseFairseqModel, task: FairseqTask) -> None:
        self.model = model
        self.task = task

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return next(self.model.parameters()).device

    def to(self, *args: Any, **kwargs: Any) -> LoadedModel:
        """Move the model to a device, such as "cuda", or cast it, as ``torch.nn.Module.to``."""
        self.model.to(*args, **kwargs)
        return self

    def score_split(
        self,
        split: str = "test",
        *,
        before_batch: Callable[[dict[str, Any], Tensor], None] | None = None,
        description: str = "scoring",
        **options: Any,
    ) -> np.ndarray:
        """Return the loss of each token of a binarized split in nats, in order: float32 (N,).

        Args:
            split: its name in the folder of the dictionary.
            before_batch: gets each batch and which of its targets (B, T) are scored.
            description: of the progress bar.
            options: of language models ``batch_size``, ``tokens_per_sample``, and
                ``extended_context`` and ``max_tokens`` of streams or ``context_window`` of blocks;
                of translation models ``batch_size``.
        """
        tokens, (batches, place) = self._read_split(split, **options)
        warn_of_unknown(int((tokens == self.task.target_dictionary.unk()).sum()), len(tokens))

        def wanted(batch: dict[str, Any]) -> Tensor:
            scored = self._scored(batch["target"])
            if before_batch is not None:
                before_batch(batch, scored)
            return scored

        places, counts, losses = [], [], []
        for rows, of_rows, found in score_batches(
            self.model, batches, wanted, len(tokens), description
        ):
            places += map(place, rows)
            counts += of_rows
            losses.append(found)
        if sum(counts) != len(tokens):
            raise ValueError(
                f"{sum(counts):,} tokens were scored of the {len(tokens):,} of the split {split}, "
                "so the figures would be wrong: fairseq leaves out what is longer than the model "
                "has positions for; take those sentences out of the split"
            )
        order = np.argsort(np.repeat(places, counts), kind="stable")
        return np.concatenate(losses)[order]

    def _read_split(self, split: str, **options: Any) -> tuple[np.ndarray, Batches]:
        """Return the tokens (N,) that a split has in its file, and its batches."""
        raise NotImplementedError

    def _scored(self, target: Tensor) -> Tensor:
        return target.ne(self.task.target_dictionary.pad())

    def _tokens(self, name: str) -> np.ndarray:
        """Return the tokens of a file of the data, (N,)."""
        # fairseq's older tasks have the other
        folder = (self.task.cfg or self.task.args).data
        try:
            return load_tokens(os.path.join(folder, name), self.task.target_dictionary)
        except FileNotFoundError as error:
            raise ValueError(f"split {name.split('.')[0]}: {error}") from error

    @staticmethod
    def _hypotheses(text: TextCoder, found: list[dict[str, Any]]) -> list[Hypothesis]:
        """Return what fairseq's generator found for one text, in its order."""
        made = []
        for one in found:
            # the last token only ends it
            tokens, log_probs = one["tokens"][:-1].cpu(), one["positional_scores"].float().cpu()
            score, symbols = float(one["score"]), text.symbols(tokens)
            made.append(Hypothesis(text.decode(tokens), score, symbols, log_probs.numpy()))
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold: all but the state of fairseq's task, its data."""
        task = copy.copy(self.task)
        # fairseq's own class of it can be neither copied nor pickled
        task.state = SimpleNamespace()
        task.datasets, task.dataset_to_epoch_iter = {}, {}
        return {**self.__dict__, "task": task}
