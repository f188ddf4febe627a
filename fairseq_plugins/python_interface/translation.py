"""Trained translation models from Python: translate and score sentences.

Shapes: B sentences of a batch, T units.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq.data import LanguagePairDataset
from fairseq.models import BaseFairseqModel
from fairseq.tasks.translation import TranslationTask
from fairseq.utils import move_to_cuda
from torch import Tensor

from fairseq_plugins.python_interface.lines import LineCoder
from fairseq_plugins.python_interface.scoring import (
    Hypothesis,
    LoadedModel,
    Score,
    check_at_least,
)
from fairseq_plugins.python_interface.text import TextCoder
from fairseq_plugins.units import PERPLEXITY


class TranslationModel(LoadedModel):
    """A model that translates sentences as fairseq-generate and fairseq-interactive do.

    ``source_lines`` and ``target_lines`` convert a sentence to units and back; None for
    whitespace-separated units. Units that the dictionaries lack are refused, or, with
    ``allow_unknown``, read as ``<unk>``.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        task: TranslationTask,
        source_lines: LineCoder | None = None,
        target_lines: LineCoder | None = None,
        allow_unknown: bool = False,
    ) -> None:
        super().__init__(model, task)
        self.source = TextCoder(task.source_dictionary, source_lines, allow_unknown)
        self.target = TextCoder(task.target_dictionary, target_lines, allow_unknown)

    def translate(self, text: str | Sequence[str], **options: Any) -> str | list[str]:
        """Translate a sentence, or each of several; newlines count as blanks.

        For the options see :meth:`hypotheses`.
        """
        if isinstance(text, str):
            return self.hypotheses([text], **options)[0][0].text
        return [best.text for best, *_ in self.hypotheses(text, **options)]

    def hypotheses(
        self,
        sentences: Sequence[str],
        *,
        beam: int = 5,
        length_penalty: float = 1.0,
        max_len_a: float = 0.0,
        max_len_b: int = 200,
        batch_size: int = 32,
    ) -> list[list[Hypothesis]]:
        """Return the ``beam`` best translations of each sentence, best first.

        Args:
            sentences: an empty one has an empty translation.
            beam: width of the search.
            length_penalty: a translation's score is divided by its length to this power.
            max_len_a: translations have at most ``max_len_a`` times the units of the longest
                source in the batch, plus ``max_len_b``.
            max_len_b: see ``max_len_a``.
            batch_size: number of sentences to translate at once.
        """
        if isinstance(sentences, str):
            raise ValueError(f"sentences is {sentences!r}: give a list of them")
        check_at_least(1, beam=beam, max_len_b=max_len_b, batch_size=batch_size)
        # more would make the scores of long translations 0 or infinite in fp32
        if not -10 <= length_penalty <= 10:
            raise ValueError(f"length_penalty is {length_penalty}: it must be between -10 and 10")
        if not 0 <= max_len_a < math.inf:
            raise ValueError(f"max_len_a is {max_len_a}: it must be a number of at least 0")
        sources = [self.encode(self.source, x, f"sentence {i}") for i, x in enumerate(sentences, 1)]
        options = {"max_len_a": max_len_a, "max_len_b": max_len_b, "lenpen": length_penalty}
        generator = self.task.build_generator([self.model], SimpleNamespace(beam=beam, **options))
        nothing = Hypothesis("", 0.0, [], np.empty(0, dtype=np.float32))
        translations = {}
        for batch in self._batches(batch_size, (sources, self.source)):
            batch = move_to_cuda(batch, device=self.device)
            rows = zip(batch["id"].tolist(), generator.generate([self.model], batch), strict=True)
            for number, candidates in rows:
                # an empty sentence has only its </s>
                empty = len(sources[number]) == 1
                translations[number] = (
                    [nothing] if empty else self._hypotheses(self.target, candidates)
                )
        return [translations[number] for number in range(len(sources))]

    def score(
        self, source: str | Sequence[str], target: str | Sequence[str], batch_size: int = 32
    ) -> Score | list[Score]:
        """Score the translation of a sentence, or of each of several, including its end."""
        if isinstance(source, str) and isinstance(target, str):
            return self.score([source], [target])[0]  # type: ignore[index]
        if isinstance(source, str) or isinstance(target, str) or len(source) != len(target):
            raise ValueError("source and target: give two texts, or two lists of equal length")
        check_at_least(1, batch_size=batch_size)
        sources = [self.encode(self.source, x, f"sentence {i}") for i, x in enumerate(source, 1)]
        targets = [self.encode(self.target, x, f"translation {i}") for i, x in enumerate(target, 1)]
        batches = self._batches(batch_size, (sources, self.source), (targets, self.target))
        scores: dict[int, Score] = {}
        for rows, counts, losses in self._losses(batches):
            for number, part in zip(rows, np.split(losses, np.cumsum(counts)[:-1]), strict=True):
                scores[number] = Score(self.target.symbols(targets[number]), -part, PERPLEXITY)
        return [scores[number] for number in range(len(source))]

    @staticmethod
    def _batches(
        batch_size: int, *sides: tuple[list[Tensor], TextCoder]
    ) -> Iterable[dict[str, Any]]:
        parts = ((texts, [*map(len, texts)], coder.dictionary) for texts, coder in sides)
        pairs = LanguagePairDataset(*itertools.chain(*parts), shuffle=False)
        order = pairs.ordered_indices().tolist()
        for first in range(0, len(order), batch_size):
            yield pairs.collater([pairs[number] for number in order[first : first + batch_size]])

    def encode(self, text: TextCoder, sentence: str, name: str) -> Tensor:
        """Return the tokens of a sentence of one side, ``</s>`` included."""
        if isinstance(sentence, str):
            sentence = re.sub(r"\r?\n", " ", sentence.strip("\r\n"))
        tokens = text.encode(sentence, name, empty=True)
        if tokens.eq(text.dictionary.eos()).any():
            raise ValueError(f"{name} has </s>, which ends a sentence: take it out")
        most = self.model.max_positions()[text is self.target]
        if len(tokens) >= most:
            raise ValueError(
                f"{name} has {len(tokens)} units, and the model has positions for {most - 1}: "
                "shorten it"
            )
        return torch.cat([tokens, tokens.new_tensor([text.dictionary.eos()])])

    def _read_split(
        self, split: str, batch_size: int = 8
    ) -> tuple[int, Iterable[dict[str, Any]], Callable[[int], int]]:
        try:
            self.task.load_dataset(split)
        except FileNotFoundError as error:
            raise ValueError(
                f"split {split}: {error}: name a split that fairseq-preprocess wrote there"
            ) from error
        pairs = self.task.dataset(split)
        batches = self.task.get_batch_iterator(
            pairs,
            max_sentences=batch_size,
            max_positions=self.model.max_positions(),
            # score_split notices what is left out, and has a better message
            ignore_invalid_inputs=True,
            required_batch_size_multiple=1,
        ).next_epoch_itr(shuffle=False)
        return int(pairs.tgt_sizes.sum()), batches, int
