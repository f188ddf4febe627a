"""Every numeric option of this package at values that nobody means.

A training of two updates either refuses the value, naming option and value, or ends with losses and
weights that are finite.
"""

import dataclasses
import math
import random
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClipConfig
from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.product_key_memory.model import MemoryTransformerOptions
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemoryConfig
from fairseq_plugins.segment_language_model.loss import SegmentLossConfig
from fairseq_plugins.segment_language_model.task_config import SegmentLanguageModelingConfig
from fairseq_plugins.transformer_xl.model import TransformerXLConfig
from fairseq_plugins.weighted_transformer.options import BranchOptions
from scripts.check._faults_materials import Materials, logged
from scripts.check._faults_programs import (
    Case,
    CaseFailedError,
    Known,
    check_refusal,
    read_tensors,
    run,
)

VALUES = ("-1", "0", "1000000000", "1e9", "nan", "inf")
# how an error may write a value that has several forms
BILLION = "1e9|1e+09|1000000000|1000000000.0|1,000,000,000"
WRITTEN = {value: value for value in VALUES}
WRITTEN |= {"1e9": BILLION, "1000000000": BILLION, "-1": "-1|-1.0", "0": "0|0.0"}
# The training whose command gets the options of a dataclass.
OWNERS: dict[str, tuple[type, ...]] = {
    "transformer_xl": (SegmentLanguageModelingConfig, TransformerXLConfig),
    "all_attention": (AllAttentionConfig, SegmentLossConfig, AdagradWithClipConfig),
    "product_key_memory": (MemoryTransformerOptions, AdamWithMemoryConfig),
    "weighted_transformer": (BranchOptions,),
}
# options that are not given together, each with those of its model that work
CONTRADICTIONS: dict[str, tuple[str, tuple[Any, ...], tuple[str, ...]]] = {
    "same length without memory": (
        "transformer_xl",
        ("--same-length", "--mem-len", 0),
        ("--same-length", "--mem-len"),
    ),
    "context and memory": (
        "transformer_xl",
        ("--extended-context", 4),
        ("--extended-context", "--mem-len"),
    ),
    "heads that do not divide": (
        "transformer_xl",
        ("--decoder-attention-heads", 3),
        ("--decoder-attention-heads", "--decoder-embed-dim"),
    ),
    "more parts than streams": ("transformer_xl", ("--batch-split", 5), ("--batch-split",)),
    "more streams than tokens": ("transformer_xl", ("--batch-size", 100000), ("--batch-size",)),
    "cutoffs beyond the dictionary": (
        "transformer_xl",
        ("--adaptive-softmax-cutoff", "10,1000"),
        ("--adaptive-softmax-cutoff",),
    ),
    "memories in layers that are not there": (
        "product_key_memory",
        ("--memory-layers", 9),
        ("--memory-layers",),
    ),
    "more neighbours than keys": ("product_key_memory", ("--memory-knn", 65), ("--memory-knn",)),
    "slots that are no square": ("product_key_memory", ("--memory-slots", 65), ("--memory-slots",)),
    # whose options are others
    "a model of no segments": ("transformer_xl", ("--arch", "transformer_lm"), ("--mem-len",)),
    "a model of pairs": (
        "transformer_xl",
        ("--arch", "weighted_transformer_tiny"),
        ("--mem-len",),
    ),
    "tokens in place of streams": ("transformer_xl", ("--max-tokens", 64), ("--max-tokens",)),
}
# failures that are known, by the name of the case
KNOWN = {
    **dict.fromkeys(
        ("--init-std 1000000000", "--init-std 1e9"),
        Known(
            "gradients are Nan/Inf",
            "The weights are as large as was asked for, and the first gradient is not finite, "
            "which fairseq tells in its own words. Give the value of a preset.",
        ),
    ),
}


def numeric(config: type) -> Iterator[str]:
    """Names of the numeric options of a dataclass but for fairseq's, as on a command line."""
    theirs = {
        option.name
        for base in config.__mro__
        if base.__module__.startswith("fairseq.") and dataclasses.is_dataclass(base)
        for option in dataclasses.fields(base)
    }
    types = typing.get_type_hints(config)
    for option in dataclasses.fields(config):
        kinds = {types[option.name], *typing.get_args(types[option.name])}
        own = option.metadata.get("help") and not str(option.default).startswith("${")
        if own and kinds & {int, float} and option.name not in theirs:
            yield f"--{option.name.replace('_', '-')}"


def train(
    materials: Materials,
    paper: str,
    options: tuple[Any, ...],
    parts: tuple[str, ...],
    refused: bool,
    folder: Path,
) -> None:
    """Train with options that nobody means; raises CaseFailedError."""
    output = folder / "model"
    words = materials.training(paper, output, "--max-update", 2, *options)
    outcome = run(words, folder)
    if outcome.status != 0:
        check_refusal(outcome, *parts)
        if output.exists() and any(output.iterdir()):
            raise CaseFailedError("it was refused after something was written")
        return
    if refused:
        raise CaseFailedError("it is accepted")
    for values in logged(outcome.printed).values():
        if not math.isfinite(float(values.get("loss") or values["valid_loss"])):
            raise CaseFailedError("it trains with losses that are not finite")
    weights = read_tensors(output / "checkpoint_last.pt")
    for name, weight in weights.items():
        if name.startswith("/model") and not weight.isfinite().all():
            raise CaseFailedError(f"{name} is not finite")


def cases(materials: Materials, quick: bool, draw: random.Random) -> Iterator[Case]:
    """All options at all values and all contradictions, or some of both."""

    def case(
        name: str, paper: str, options: tuple[Any, ...], parts: tuple[str, ...], refused: bool
    ) -> Case:
        return Case(
            f"{paper}: {name}",
            lambda folder: train(materials, paper, options, parts, refused, folder),
            KNOWN.get(name),
        )

    values = [
        case(f"{option} {value}", paper, (option, value), (option, WRITTEN[value]), False)
        for paper, configs in OWNERS.items()
        for config in configs
        for option in numeric(config)
        for value in VALUES
    ]
    contradictions = [case(name, *row, True) for name, row in CONTRADICTIONS.items()]
    yield from draw.sample(values, 12) if quick else values
    yield from draw.sample(contradictions, 3) if quick else contradictions
