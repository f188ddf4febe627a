"""Additions to fairseq's evaluation: checks of the targets, figures without line ends.

Some published perplexities leave ``</s>`` out (all-attention on WikiText-103), so both are printed.

Shapes: B streams, T tokens of a segment, V symbols.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary, FairseqDataset
from fairseq.data.iterators import CountingIterator
from fairseq.distributed.utils import get_global_world_size
from fairseq.tasks import FairseqTask
from fairseq.utils import split_paths
from torch import Tensor

from fairseq_plugins.segment_language_model.options import SegmentLanguageModelingConfig
from fairseq_plugins.units import BITS, loss_unit, read_units

logger = logging.getLogger(__name__)

# The output bias of symbols that a converted model lacks. Their probability is 0 even in half
# precision; no other symbol comes near it.
IMPOSSIBLE_BIAS = -1e4


class EvaluationTask(FairseqTask):
    """What the task of segment models does for fairseq-eval-lm."""

    cfg: SegmentLanguageModelingConfig
    dictionary: Dictionary

    def eval_lm_dataloader(
        self,
        dataset: FairseqDataset,
        batch_size: int | None = None,
        context_window: int = 0,
        **options: Any,
    ) -> TalliedBatches:
        """Return the batches for fairseq-eval-lm, in ``batch_size`` streams, 1 if None."""
        workers = get_global_world_size()
        if workers > 1:
            raise ValueError(
                f"--distributed-world-size is {workers}: fairseq-eval-lm would print the loss of "
                "only one worker's part of the text; give --distributed-world-size 1, the default"
            )
        if context_window > 0:
            raise ValueError(
                f"--context-window is {context_window}: the recurrence is the context here; leave "
                "the option out, and give --model-overrides \"{'mem_len': ...}\", or "
                "--extended-context for a model without recurrence"
            )
        if self.cfg.post_process:
            raise ValueError(
                f"--post-process (--remove-bpe) is {self.cfg.post_process!r}: it would join the "
                "parts of a word only within a segment, and the loss would depend on "
                "--tokens-per-sample; leave it out"
            )
        characters = loss_unit(read_units(Path(split_paths(self.cfg.data)[0])).unit) == BITS
        if characters:
            logger.info("each token is a character: Loss (base 2) is in bits per character")
        names = {"num_shards", "shard_id", "data_buffer_size"} & options.keys()
        streams = self.get_batch_iterator(
            dataset, max_sentences=batch_size, **{name: options[name] for name in names}
        )
        return TalliedBatches(streams.next_epoch_itr(shuffle=False), self.dictionary, characters)


def check_and_tally(
    probs: Tensor, log_probs: bool, sample: dict[str, Any], dictionary: Dictionary
) -> None:
    """Check the targets' (log-)probabilities, of (B, T, V), and add them to the batch's tally.

    fairseq asks the models of an ensemble for probabilities, and averages them later: no tally.
    """
    target = sample["target"]
    target_probs = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    if not log_probs:
        # a probability of 0 is a symbol that is impossible
        target_probs = target_probs.float().log().clamp(min=IMPOSSIBLE_BIAS)
    check_targets(target_probs, target, dictionary)
    if log_probs and "tally" in sample:
        sample["tally"].add(target_probs, target)


def check_targets(target_log_probs: Tensor, target: Tensor, dictionary: Dictionary) -> None:
    """Refuse log-probabilities (B, T) of targets that are not finite, or of impossible symbols."""
    if not target_log_probs.isfinite().all():
        # fairseq-eval-lm would leave the token out of its average
        raise FloatingPointError(
            "the log-probability of a token is not finite: evaluate without --fp16, or look for "
            "NaN in the checkpoint"
        )
    impossible = target[(target_log_probs < IMPOSSIBLE_BIAS / 2) & target.ne(dictionary.pad())]
    if impossible.numel():
        symbols = sorted({dictionary[symbol] for symbol in impossible.tolist()})
        raise ValueError(
            f"the text has {', '.join(symbols)}, which the model was converted without and can "
            "never predict: use only symbols of its vocabulary, and text without line ends for a "
            "model without </s>"
        )


class TalliedBatches:
    """The batches of an evaluation; each carries this tally, which is logged at the end."""

    def __init__(self, batches: CountingIterator, dictionary: Dictionary, characters: bool) -> None:
        self._batches = batches
        self._pad, self._eos = dictionary.pad(), dictionary.eos()
        self._unit = BITS if characters else "bits a token"
        self._sum = 0.0
        self._others = self._line_ends = 0

    def add(self, log_probs: Tensor, target: Tensor) -> None:
        """Add the tokens ``target`` (B, T) and their log-probabilities (B, T), in nats."""
        line_ends, scored = target.eq(self._eos), target.ne(self._pad)
        others = scored & ~line_ends
        self._sum += float(log_probs.double().masked_fill(~others, 0.0).sum())
        self._others += int(others.sum())
        self._line_ends += int(line_ends.sum())

    def describe(self) -> str | None:
        """Describe the loss without line ends; None if there are no line ends, or nothing else."""
        others, line_ends = self._others, self._line_ends
        if others == 0 or line_ends == 0:
            return None
        nats = -self._sum / others
        return (
            f"without line ends: {nats / math.log(2):.4f} {self._unit}, "
            f"perplexity {math.exp(nats):.2f} ({others:,} of {others + line_ends:,} tokens)"
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self._batches:
            yield {**batch, "tally": self}
        if description := self.describe():
            logger.info(description)
