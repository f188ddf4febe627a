"""Models with random weights, of the sizes of a preset or of a trained model: to time them.

Of each size there are two: one that reuses states, and one that reads a window anew for each token
(Transformer-XL, section 4.5).
"""

import argparse
import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from fairseq.data import Dictionary
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
)

from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from scripts._shared.scoring import has_absolute_positions, load_checkpoint


class Sizes(NamedTuple):
    """What to build models from: name, options and number of symbols of one."""

    model: str
    options: dict[str, Any]
    symbols: int


def sizes_of_arch(arch: str, symbols: int) -> Sizes:
    """Sizes of a preset with a vocabulary of ``symbols``.

    Raises ValueError when there is no such preset, or its cutoffs go beyond the vocabulary.
    """
    known = sorted(
        name
        for name, model in ARCH_MODEL_REGISTRY.items()
        if issubclass(model, SegmentLanguageModel)
    )
    if arch not in known:
        raise ValueError(f"--arch {arch} is none of this package: give one of {', '.join(known)}")
    preset = argparse.Namespace()
    ARCH_CONFIG_REGISTRY[arch](preset)
    options = vars(preset)
    cutoffs = options.get("adaptive_softmax_cutoff") or options.get("adaptive_input_cutoff")
    if cutoffs and int(cutoffs.split(",")[-1]) >= symbols:
        raise ValueError(
            f"--symbols is {symbols}: --arch {arch} has cutoffs {cutoffs}; give the number of "
            "symbols in dict.txt, specials included, such as 267744 for WikiText-103"
        )
    return Sizes(ARCH_MODEL_NAME_REGISTRY[arch], options, symbols)


def sizes_of_checkpoint(checkpoint: Path) -> Sizes:
    """Sizes of a trained model; raises as load_checkpoint."""
    state = load_checkpoint(checkpoint)
    options = dict(state["cfg"]["model"])
    symbols = sum(
        weight.size(0)
        for name, weight in state["model"].items()
        if name == "decoder.embed_tokens.weight"
        or (name.startswith("decoder.embed_tokens.embeddings.") and name.endswith(".0.weight"))
    )
    return Sizes(ARCH_MODEL_NAME_REGISTRY[options["_name"]], options, symbols)


def check_reuse(sizes: Sizes) -> None:
    """Raise ValueError for a model that cannot reuse states."""
    if has_absolute_positions(sizes.options):
        raise ValueError(
            f"the model has --positions {sizes.options['positions']}, which go without a memory, "
            "so there is no state to reuse: give one with relative positions"
        )


def make_task(
    symbols: int, tokens_per_sample: int, extended_context: int
) -> SegmentLanguageModelingTask:
    """Task over random text of a vocabulary."""
    dictionary = Dictionary()
    for number in range(symbols - len(dictionary)):
        dictionary.add_symbol(f"symbol{number}")
    options = SegmentLanguageModelingConfig(
        tokens_per_sample=tokens_per_sample, extended_context=extended_context, dataset_impl=None
    )
    return SegmentLanguageModelingTask(options, dictionary)


def build(sizes: Sizes, task: SegmentLanguageModelingTask, **changes: Any) -> SegmentLanguageModel:
    """Model with random weights, some of its options changed."""
    dataclass = MODEL_DATACLASS_REGISTRY[sizes.model]
    names = {field.name for field in dataclasses.fields(dataclass)}
    options = {**sizes.options, **changes, "checkpoint_activations": False}
    options["tokens_per_sample"] = task.cfg.tokens_per_sample
    options["extended_context"] = task.cfg.extended_context
    config = dataclass(**{name: options[name] for name in options if name in names})
    model = ARCH_MODEL_REGISTRY[sizes.model].build_model(config, task)
    return model.eval()


def span_option(sizes: Sizes, attention_length: int) -> dict[str, int]:
    """Attention span of an all-attention model, which limits its attention length."""
    fixed_span = "attention_span" in {
        field.name for field in dataclasses.fields(MODEL_DATACLASS_REGISTRY[sizes.model])
    }
    return {"attention_span": attention_length} if fixed_span else {}


def build_state_reuse(
    sizes: Sizes, attention_length: int, tokens_per_sample: int
) -> tuple[SegmentLanguageModel, SegmentLanguageModelingTask]:
    """Model with a memory of ``attention_length`` tokens, and its task."""
    task = make_task(sizes.symbols, tokens_per_sample, 0)
    changes = {"mem_len": attention_length, "same_length": True}
    return build(sizes, task, **changes, **span_option(sizes, attention_length)), task


def build_sliding_window(
    sizes: Sizes, attention_length: int
) -> tuple[SegmentLanguageModel, SegmentLanguageModelingTask]:
    """Model of the same sizes that reads ``attention_length`` tokens for each, and its task."""
    task = make_task(sizes.symbols, 1, attention_length - 1)
    changes = {"mem_len": 0, "same_length": False, "clamp_len": None}
    changes.update(span_option(sizes, attention_length))
    if sizes.model == "transformer_xl":
        changes.update(positions="sinusoidal-absolute", untie_r=False)
    return build(sizes, task, **changes), task
