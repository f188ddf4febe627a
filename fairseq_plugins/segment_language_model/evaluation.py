"""What evaluation does with the probabilities of tokens, beside fairseq's average of them all.

fairseq-eval-lm counts line ends, ``</s>``, as tokens. Some published perplexities leave them out of
the mean (all-attention on WikiText-103), so both are printed.

Shapes: B streams, T tokens of a segment, V symbols.
"""

import logging
import math
from collections.abc import Iterable, Iterator
from typing import Any

from fairseq.data import Dictionary
from torch import Tensor

from fairseq_plugins.segment_language_model.generation import is_characters

logger = logging.getLogger(__name__)


def temper(probs: Tensor, temperature: float, log_probs: bool) -> Tensor:
    """Return (log-)probabilities (…, V) of the scores divided by ``temperature``.

    Scores and log-probabilities differ by a number for each token, which the softmax takes out: it
    does not matter which of the two is divided.
    """
    scores = (probs if log_probs else probs.log()) / temperature
    return scores.log_softmax(-1) if log_probs else scores.softmax(-1)


class LineEndTally:
    """Sums of the log-probabilities of an evaluation's tokens, those of line ends apart.

    Args:
        dictionary: the symbols.
    """

    def __init__(self, dictionary: Dictionary) -> None:
        self._pad, self._eos = dictionary.pad(), dictionary.eos()
        self._unit = "bits per character" if is_characters(dictionary) else "bits a token"
        # tensors from the first batch on, so that a GPU need not be waited for
        self._sum: Tensor | float = 0.0
        self._others: Tensor | int = 0
        self._line_ends: Tensor | int = 0

    def add(self, log_probs: Tensor, target: Tensor) -> None:
        """Count the tokens ``target`` (B, T) with their log-probabilities (B, T), in nats."""
        line_ends, scored = target.eq(self._eos), target.ne(self._pad)
        others = scored & ~line_ends
        self._sum = self._sum + log_probs.double().masked_fill(~others, 0.0).sum()
        self._others = self._others + others.sum()
        self._line_ends = self._line_ends + line_ends.sum()

    def describe(self) -> str | None:
        """Return the figures without line ends in words; None where there are none, or no other."""
        others, line_ends = int(self._others), int(self._line_ends)
        if others == 0 or line_ends == 0:
            return None
        nats = -float(self._sum) / others
        return (
            f"without line ends: {nats / math.log(2):.4f} {self._unit}, "
            f"perplexity {math.exp(nats):.2f} ({others:,} of {others + line_ends:,} tokens)"
        )


class TalliedBatches:
    """The batches of an evaluation, which at its end logs its figures without line ends.

    Args:
        batches: the walk over the text.
        tally: what the decoder adds each batch to.
    """

    def __init__(self, batches: Iterable[dict[str, Any]], tally: LineEndTally) -> None:
        self._batches = batches
        self._tally = tally

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield {**batch, "tally": self._tally}
        figures = self._tally.describe()
        if figures is not None:
            logger.info(figures)
