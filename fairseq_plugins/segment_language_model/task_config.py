"""Options of the task, and what is wrong with their values."""

import math
import os
from dataclasses import dataclass, field
from typing import Optional

from fairseq import utils
from fairseq.data.indexed_dataset import get_available_dataset_impl
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II

from fairseq_plugins.fairseq_integration.error_messages import flag

# Tokens that are computed at once, at a cost that grows with their square: hours beyond these.
LONGEST_SEGMENT = 2**20


@dataclass
class SegmentLanguageModelingConfig(FairseqDataclass):
    """Options of ``segment_language_modeling``."""

    data: Optional[str] = field(
        default=None,
        metadata={
            "help": "folder that fairseq-preprocess wrote; several, with : between them, are "
            "read in turn, one an epoch"
        },
    )
    tokens_per_sample: int = field(
        default=512, metadata={"help": "segment length: tokens that are computed at once"}
    )
    segment_jitter: int = field(
        default=0,
        metadata={
            "help": "standard deviation of the lengths of training segments, in tokens: each is "
            "drawn around --tokens-per-sample, or, one in twenty, around half of it, is at least 5 "
            "and at most three deviations longer than --tokens-per-sample (0: all alike; published "
            "for Penn Treebank: 5)"
        },
    )
    extended_context: int = field(
        default=0,
        metadata={
            "help": "tokens that are read anew before each segment's own and not scored: the "
            "context of models without recurrence (--mem-len 0)"
        },
    )
    tokens_per_sample_valid: Optional[int] = field(
        default=None,
        metadata={
            "help": "segment length in validation, at most --tokens-per-sample; the recurrence, or "
            "without one the extended context, is longer by what segments are shorter by (None: as "
            "in training)"
        },
    )
    softmax_temperature: float = field(
        default=1.0,
        metadata={
            "help": "in evaluation, what scores are divided by before the softmax; the published "
            "Transformer-XL has 1.08 on Penn Treebank"
        },
    )
    batch_split: int = field(
        default=1,
        metadata={
            "help": "train on the streams of a batch in so many parts, one after another: the same "
            "update, with activations of one part at a time"
        },
    )
    continue_past_eos: bool = field(
        default=False,
        metadata={
            "help": "generation goes on past </s>, to --max-len-b tokens, and prints it: for "
            "models of running text, where </s> is the end of a line"
        },
    )
    shuffle_sentences: bool = field(
        default=False,
        metadata={
            "help": "read the sentences of the training part, each up to its </s>, in a new random "
            "order every epoch, as the published Transformer-XL does on One Billion Word"
        },
    )
    no_save_memory: bool = field(
        default=False,
        metadata={
            "help": "leave the streams' recurrence (layers x streams x --mem-len x width numbers) "
            "out of checkpoints in mid-epoch; a run resumed from one starts cold"
        },
    )
    batch_size: Optional[int] = II("dataset.batch_size")
    train_subset: str = II("dataset.train_subset")
    post_process: Optional[str] = II("common_eval.post_process")
    dataset_impl: Optional[ChoiceEnum(get_available_dataset_impl())] = II("dataset.dataset_impl")


def find_dictionary(cfg: SegmentLanguageModelingConfig) -> str:
    """Return the path of the dictionary, with the other options checked."""
    if not cfg.data:
        raise ValueError("DATA is missing: name the folder that fairseq-preprocess wrote")
    for option, least in (("tokens_per_sample", 1), ("segment_jitter", 0), ("extended_context", 0)):
        value = getattr(cfg, option)
        if value < least:
            raise ValueError(f"{flag(option)} is {value}: it must be at least {least}")
    if not 0 < cfg.softmax_temperature < math.inf:
        raise ValueError(
            f"--softmax-temperature is {cfg.softmax_temperature}: it must be above 0, and finite"
        )
    valid = cfg.tokens_per_sample_valid
    if valid is not None and not 1 <= valid <= cfg.tokens_per_sample:
        raise ValueError(
            f"--tokens-per-sample-valid is {valid}: it must be at least 1, and at most "
            f"--tokens-per-sample, {cfg.tokens_per_sample}"
        )
    path = os.path.join(utils.split_paths(cfg.data)[0], "dict.txt")
    if not os.path.isfile(path):
        raise ValueError(
            f"DATA is {cfg.data}: there is no {path}; name the folder that fairseq-preprocess wrote"
        )
    return path


def check_streams(streams: int, num_shards: int, tokens: int) -> None:
    """Raise ``ValueError`` where each of ``num_shards`` workers cannot have so many streams."""
    if streams < 1:
        raise ValueError(f"--batch-size is {streams}: it must be at least 1")
    if streams * num_shards > tokens:
        workers = f" with {num_shards} workers" if num_shards > 1 else ""
        raise ValueError(
            f"--batch-size is {streams}{workers}: that makes {streams * num_shards} parallel "
            f"streams of a split with {tokens} tokens; use at most {tokens // num_shards} (for "
            "validation: --batch-size-valid)"
        )


def check_segment(option: str, segment_length: int, tokens: int, streams: int) -> None:
    """Raise ``ValueError`` for segments that no machine computes at once.

    Args:
        option: which sets the length.
        segment_length: may be longer than what there is.
        tokens: N, of the split.
        streams: S, of all workers.
    """
    longest = min(segment_length, tokens // max(1, streams))
    if longest > LONGEST_SEGMENT:
        raise ValueError(
            f"{option} is {segment_length}: that makes segments of {longest:,} tokens, "
            f"each computed at once; give at most {LONGEST_SEGMENT:,}"
        )
