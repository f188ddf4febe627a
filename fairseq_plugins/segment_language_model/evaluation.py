"""Evaluation beside fairseq's average: units, softmax temperature, figures without line ends.

Commands that prepare data write what a symbol is into units.json beside dict.txt. Some published
perplexities leave ``</s>`` out (all-attention on WikiText-103), so both are printed.

Shapes: B streams, T tokens of a segment, V symbols.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from fairseq.data import Dictionary
from fairseq.data.iterators import CountingIterator
from torch import Tensor

logger = logging.getLogger(__name__)

UNITS = ("characters", "bytes", "words", "subwords")
BITS, PERPLEXITY = "bits per character", "perplexity"
# The output bias of symbols that a converted model does not have: their probability is 0, in half
# precision too. Those that it has come nowhere near it.
IMPOSSIBLE_BIAS = -1e4


def evaluate_probs(
    probs: Tensor,
    log_probs: bool,
    sample: dict[str, Any] | None,
    temperature: float,
    dictionary: Dictionary,
) -> Tensor:
    """Return (log-)probabilities (B, T, V) at the temperature; check and tally those of targets."""
    scored = sample if log_probs else None
    if scored is not None:
        _check_targets(_of_targets(probs, scored["target"]), scored["target"], dictionary)
    if temperature != 1:
        # log-probabilities serve as scores: they differ by a constant for each token
        scores = (probs if log_probs else probs.log()) / temperature
        probs = scores.log_softmax(-1) if log_probs else scores.softmax(-1)
    if scored is not None and "tally" in scored:
        scored["tally"].add(_of_targets(probs, scored["target"]), scored["target"])
    return probs


def _check_targets(of_targets: Tensor, target: Tensor, dictionary: Dictionary) -> None:
    """Refuse log-probabilities (B, T) of ``target`` that are not finite or impossible."""
    if not of_targets.isfinite().all():
        # fairseq-eval-lm would leave that token out of its average
        raise FloatingPointError(
            "the log-probability of a token is not finite: evaluate without --fp16, or look for "
            "NaN in the checkpoint"
        )
    impossible = target[(of_targets < IMPOSSIBLE_BIAS / 2) & target.ne(dictionary.pad())]
    if impossible.numel():
        symbols = sorted({dictionary[symbol] for symbol in impossible.tolist()})
        raise ValueError(
            f"the text has {', '.join(symbols)}, which the model was converted without and can "
            "never predict: take symbols of its vocabulary only, and text without line ends for a "
            "model without </s>"
        )


def _of_targets(log_probs: Tensor, target: Tensor) -> Tensor:
    """Return what ``log_probs`` (B, T, V) have for the tokens ``target``, (B, T)."""
    return log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)


class TalliedBatches:
    """The batches of an evaluation, each with this as its ``tally``, which logs at the end."""

    def __init__(self, batches: CountingIterator, dictionary: Dictionary, characters: bool) -> None:
        self._batches = batches
        self._pad, self._eos = dictionary.pad(), dictionary.eos()
        self._unit = BITS if characters else "bits a token"
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
        """Return the figures without line ends; None without line ends, or other tokens."""
        others, line_ends = int(self._others), int(self._line_ends)
        if others == 0 or line_ends == 0:
            return None
        nats = -float(self._sum) / others
        return (
            f"without line ends: {nats / math.log(2):.4f} {self._unit}, "
            f"perplexity {math.exp(nats):.2f} ({others:,} of {others + line_ends:,} tokens)"
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield {**batch, "tally": self}
        figures = self.describe()
        if figures is not None:
            logger.info(figures)


class Units(NamedTuple):
    """What units.json says.

    ``bpe`` and ``tokenizer`` are fairseq's names, ``model`` is the BPE's file, ``language`` that of
    the tokenizer's rules. ``symbols`` are characters that are written in another way.
    """

    unit: str = "words"
    bpe: str | None = None
    model: Path | None = None
    tokenizer: str | None = None
    language: str | None = None
    symbols: Mapping[str, str] = MappingProxyType({})


def read_units(folder: Path) -> Units:
    """Return what the units.json of a folder says; words where there is none."""
    path = folder / "units.json"
    if not path.is_file():
        return Units()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        units = Units(**{name: found[name] for name in Units._fields if found.get(name)})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): prepare the data again") from error
    check_unit(units.unit, f"unit in {path}")
    return units._replace(model=folder / units.model) if units.model else units


def check_unit(unit: str, name: str = "unit") -> None:
    """Refuse a unit that is not in :data:`UNITS`."""
    if unit not in UNITS:
        raise ValueError(f"{name} is {unit!r}: there are {', '.join(UNITS)}")


def loss_unit(unit: str) -> str:
    """Return the usual unit of a text's loss."""
    return BITS if unit in ("characters", "bytes") else PERPLEXITY
