"""Write docs/options.md and docs/presets.md: every option and every preset, as the code has them.

    python -m scripts.docs.tables

Help texts and sizes come from the code, parameters from models that are built without their
numbers; headings and remarks stand here.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_plugins.fairseq_integration.registration import register
from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import ROOT, short
from scripts._shared.files import write_text

DOCS = ROOT / "docs"
OPTIONS = """# Options

Every option of this package, with its default. [presets.md](presets.md) has the sizes that `--arch`
sets. `--model-overrides "{'mem_len': 64}"`, with underscores, changes options at evaluation."""
FAIRSEQ = """## fairseq's own options

All other options of fairseq's five commands work as in fairseq."""
PRESETS = """# Presets

`--arch` with one of these names sets sizes and dropouts as published. Options given beside it win.
Parameters are counted for the published vocabulary, output biases included. fairseq adds a row of
the embeddings for each of its symbols that the text lacks."""
# by what is in a preset's name, the first that fits
SYMBOLS = {
    "enwik8": 205,
    "text8": 28,
    "wt103": 267_735,
    "lm1b": 793_471,
    "ptb": 10_000,
    "tiny": 100,
    "wmt": 37_000,
    "pkm": 60_000,
}


class Section(NamedTuple):
    """A model of docs/presets.md, its task, remarks by how a name ends, and a note."""

    model: str
    task: str
    remarks: dict[str, str]
    note: str = ""


SECTIONS = [
    Section(
        "transformer_xl",
        "segment_language_modeling",
        {
            "enwik8_18l": "88M in the paper; sizes are our choice",
            "wt103_large": "257M in the paper",
            "wt103_ablation": "128M in the paper; sizes are our choice",
            "lm1b_20l": "0.46B in the paper",
            "lm1b_large": "0.8B in the paper",
            "lm1b_ablation": "0.3B in the paper; the inner width is our choice",
            "ptb": "24M in the paper, which leaves no room for W_kR: sinusoidal absolute positions",
            "tiny": "for 100 symbols",
        },
        "TensorFlow's large models of words also have `--untie-r`, on One Billion Word\n"
        "  `--no-adaptive-head-proj`: see the flags of the recipes.",
    ),
    Section(
        "all_attention_lm",
        "segment_language_modeling",
        {
            "all_attention_lm_text8_large_ff_attn": '"the same number" in the paper',
            "all_attention_lm_wt103": "133M in the paper",
            "tiny": "for 100 symbols",
        },
        "all-attention has N persistent vectors in place of an inner width. The last size is the\n"
        "  span, which is adaptive except in `all_attention_lm_tiny`.",
    ),
    Section(
        "pkm_transformer_lm",
        "language_modeling",
        {
            "pkm_transformer_lm_ablation": "a memory of 512² slots in layer 5",
            "tiny": "for 100 symbols; a memory of 1,024 slots in layer 3",
        },
        "counted for 60,000 symbols and 512 positions. `--memory-layers` adds memories.",
    ),
    Section(
        "pkm_transformer",
        "translation",
        {"tiny": "for 100 symbols; memories in encoder layer 2 and decoder layer 1"},
    ),
    Section(
        "weighted_transformer",
        "translation",
        {
            "2l": "(C), 36M in the paper",
            "4l": "N = 4, 50M in the paper",
            "base": "(A), 65M in the paper",
            "8l": "N = 8, 80M in the paper",
            "big": "(B), 213M in the paper",
            "tiny": "for 100 symbols",
        },
        "as many branches as heads, one embedding for both languages and the output,\n"
        "  counted for 37,000 symbols.",
    ),
]


def parse(words: Iterable[str]) -> argparse.Namespace:
    """The options of a fairseq-train command, with those of its preset."""
    register()
    from fairseq import options

    return options.parse_args_and_arch(options.get_training_parser(), list(words))


@cache
def dictionary(symbols: int) -> Any:
    """A dictionary of ``symbols`` symbols, fairseq's special ones included."""
    from fairseq.data import Dictionary

    made = Dictionary()
    for number in range(symbols - len(made)):
        made.add_symbol(f"symbol{number}")
    return made


def build(given: argparse.Namespace, symbols: int) -> Any:
    """The model of these options on the meta device, without its numbers."""
    import torch
    from fairseq.models import build_model

    joint = dictionary(symbols)
    task = argparse.Namespace(source_dictionary=joint, target_dictionary=joint)
    with torch.device("meta"):
        return build_model(given, task)


def count_parameters(model: Any) -> int:
    """How many numbers are trained in a model."""
    return sum(parameter.numel() for parameter in model.parameters())


def preset_row(arch: str, section: Section) -> str:
    """Row of a table for a preset: name, sizes, number of parameters, remark."""
    task = section.task
    length = [] if task == "translation" else ["--tokens-per-sample", "512"]
    model = parse(["DATA", "--task", task, "--arch", arch, *length])
    symbols = next(count for name, count in SYMBOLS.items() if name in arch)
    parameters = count_parameters(build(model, symbols))
    layers = f"{model.encoder_layers} + " if task == "translation" else ""
    inner = getattr(model, "persistent_vectors", 0) or model.decoder_ffn_embed_dim
    width, heads = model.decoder_embed_dim, model.decoder_attention_heads
    sizes = f"{layers}{model.decoder_layers}, {width}, {heads}, {inner}"
    if section.model == "all_attention_lm":
        sizes += f", {model.attention_span}"
    remark = next((text for name, text in section.remarks.items() if arch.endswith(name)), "")
    return f"| `{arch}` | {sizes} | {parameters:,} | {remark} |"


def presets_page() -> str:
    """Text of docs/presets.md."""
    register()
    from fairseq.models import ARCH_MODEL_INV_REGISTRY

    rows = [
        preset_row(arch, section)
        for section in SECTIONS
        for arch in ARCH_MODEL_INV_REGISTRY[section.model]
        if arch != section.model
    ]
    notes = [f"- `{section.model}`: {section.note}" for section in SECTIONS if section.note]
    head = ["| `--arch` | layers, width, heads, inner width | parameters | |", "|---|---|---|---|"]
    return "\n\n".join([PRESETS, "\n".join(notes), "\n".join([*head, *rows])]) + "\n"


def option_rows(config: type, left_out: Iterable[str] = ()) -> list[str]:
    """Rows of the options of a dataclass that have a help text, but for those with these names."""
    rows = []
    for option in dataclasses.fields(config):
        if option.name in {"_name", "data", *left_out} or not option.metadata.get("help"):
            continue
        default = "" if option.default is None or option.default is False else option.default
        text = option.metadata["help"].replace("|", "\\|")
        rows.append(f"| `--{option.name.replace('_', '-')}` | {default} | {text} |")
    return rows


def names(config: type) -> set[str]:
    """Names of the options of a dataclass."""
    return {option.name for option in dataclasses.fields(config)}


def options_page() -> str:
    """Text of docs/options.md."""
    register()
    from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
    from fairseq.models import MODEL_DATACLASS_REGISTRY
    from fairseq.models.transformer import TransformerModel
    from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY
    from fairseq.tasks import TASK_DATACLASS_REGISTRY

    criteria, optimizers = CRITERION_DATACLASS_REGISTRY, OPTIMIZER_DATACLASS_REGISTRY
    models = MODEL_DATACLASS_REGISTRY
    parser = argparse.ArgumentParser()
    TransformerModel.add_args(parser)
    of_transformer = {action.dest for action in parser._actions}
    of_memory = names(models["pkm_transformer_lm"]) - names(models["transformer_lm"])
    transformer_xl, all_attention = (
        option_rows(models[name], of_memory) for name in ("transformer_xl", "all_attention_lm")
    )
    shared = [row for row in transformer_xl if row in all_attention]
    sections = [
        (
            "Task `segment_language_modeling`",
            "",
            option_rows(TASK_DATACLASS_REGISTRY["segment_language_modeling"]),
        ),
        (
            "Models `transformer_xl` and `all_attention_lm`",
            "They also take the options of [product-key memory](#product-key-memory).",
            shared,
        ),
        (
            "Model `transformer_xl`",
            "By default its recurrence is as long as the segments in training, or 0 with absolute "
            "positions or `--extended-context`.",
            [row for row in transformer_xl if row not in shared],
        ),
        (
            "Model `all_attention_lm`",
            "By default its recurrence is as long as its span.",
            [row for row in all_attention if row not in shared],
        ),
        (
            "Criterion `segment_loss`, optimizer `adagrad_with_clip`",
            "The last two options belong to the optimizer. The criterion also takes the options of "
            "fairseq's `cross_entropy`.",
            option_rows(criteria["segment_loss"], names(criteria["cross_entropy"]))
            + option_rows(optimizers["adagrad_with_clip"]),
        ),
        (
            "Product-key memory",
            "`pkm_transformer` takes `--encoder-memory-layers` and `--decoder-memory-layers`, the "
            "other models\n`--memory-layers`. The last two options belong to the optimizer "
            "`adam_with_memory`.",
            option_rows(models["pkm_transformer_lm"], names(models["transformer_lm"]))
            + option_rows(models["pkm_transformer"], of_transformer | of_memory)
            + option_rows(optimizers["adam_with_memory"], names(optimizers["adam"])),
        ),
        (
            "Model `weighted_transformer`",
            "It also takes the options of fairseq's `transformer`; its optimizer "
            "`adam_with_branch_weights` takes those of `adam`.",
            option_rows(models["weighted_transformer"], of_transformer),
        ),
    ]
    parts = [OPTIONS]
    for title, text, rows in sections:
        table = "\n".join(["| option | default | |", "|---|---|---|", *rows])
        parts += filter(None, [f"## {title}", text, table])
    return "\n\n".join([*parts, FAIRSEQ, options_of_fairseq()]) + "\n"


def options_of_fairseq() -> str:
    """Table of fairseq's own options that models here refuse, or that have no effect."""
    from fairseq_plugins.fairseq_integration import command_options
    from fairseq_plugins.fairseq_integration.error_messages import flag

    shown = {
        name: ", ".join(f"`{flag(option)}`" for option in listed)
        for name, listed in {
            "refused": command_options.REFUSED,
            "blocks": command_options.OF_BLOCKS,
            **command_options.WITHOUT_EFFECT,
        }.items()
    }
    segments = f"`--task {command_options.SEGMENTS}`"
    rows = [
        (segments, "all", shown["blocks"], ""),
        (
            segments,
            "train, eval-lm",
            "`--max-tokens`, `--context-window`, `--post-process` and `--remove-bpe`, several "
            "workers in eval-lm",
            shown["train, eval-lm"],
        ),
        (segments, "generate, interactive", shown["refused"], shown["generate, interactive"]),
        (
            "models of this package",
            "train",
            "`--model-parallel-size`, `--pipeline-model-parallel`, `--ddp-backend fully_sharded` "
            "and `slowmo`; with spans, memories with `adam_with_memory` or branches `--use-bmuf` "
            "and `--zero-sharding`, too",
            "",
        ),
        (
            "`weighted_transformer`",
            "train",
            "`--cross-self-attention`, `--no-cross-attention`, `--quant-noise-pq`, "
            "`--quant-noise-scalar`, `--encoder-xformers-att-config`, "
            "`--decoder-xformers-att-config`, `--fp16-adam-stats`",
            "",
        ),
        ("translation", "generate, interactive", "", shown["translation"]),
    ]
    head = ["| with | command | refused | without effect |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def write(output: Path) -> None:
    """Write both pages into a folder."""
    write_text(output / "options.md", options_page())
    write_text(output / "presets.md", presets_page())


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, default=DOCS, help=f"folder ({short(DOCS)})")
    output = parser.parse_args(arguments).output.resolve()
    return exit_status(lambda: write(output))


if __name__ == "__main__":
    sys.exit(main())
