"""Write the tables of docs/options.md and docs/presets.md: all options and presets in the code.

    python -m scripts.docs.tables

Help texts and sizes come from the code, numbers of parameters from models built without weights.
The text around the tables, and the remarks on presets, are kept.
"""

import argparse
import dataclasses
import re
import sys
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from fairseq_plugins.fairseq_integration.registration import register
from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import ROOT, short
from scripts._shared.files import write_text

DOCS = ROOT / "docs"
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
# size of the dictionary, by a part of the preset's name; the first match counts
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
TASKS = {
    "transformer_xl": "segment_language_modeling",
    "all_attention_lm": "segment_language_modeling",
    "pkm_transformer_lm": "language_modeling",
    "pkm_transformer": "translation",
    "weighted_transformer": "translation",
}


def parse(words: Iterable[str]) -> argparse.Namespace:
    """Parse the options of a fairseq-train command, including those of its preset."""
    register()
    from fairseq import options

    return options.parse_args_and_arch(options.get_training_parser(), list(words))


def configuration(parsed: argparse.Namespace) -> Any:
    """Return the options of the model, as fairseq builds it from parsed ones."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    with warnings.catch_warnings():
        # fairseq's own use of hydra causes warnings
        warnings.simplefilter("ignore", UserWarning)
        return convert_namespace_to_omegaconf(parsed).model


@cache
def dictionary(symbols: int) -> Any:
    """Return a dictionary of ``symbols`` symbols, including fairseq's special symbols."""
    from fairseq.data import Dictionary

    made = Dictionary()
    for number in range(symbols - len(made)):
        made.add_symbol(f"symbol{number}")
    return made


def build(options: Any, symbols: int) -> Any:
    """Build the model of these options on the meta device, without weights."""
    import torch
    from fairseq.models import ARCH_MODEL_REGISTRY, build_model

    from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
    from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask

    joint = dictionary(symbols)
    if issubclass(ARCH_MODEL_REGISTRY[options._name], SegmentLanguageModel):
        task = SegmentLanguageModelingTask(argparse.Namespace(data=None), joint)
    else:
        task = argparse.Namespace(source_dictionary=joint, target_dictionary=joint)
    with torch.device("meta"):
        return build_model(options, task)


def count_parameters(model: Any) -> int:
    """Return the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def preset_row(arch: str, name: str) -> str:
    """Return the start of a preset's table row: name, sizes, number of parameters."""
    task = TASKS[name]
    length = [] if task == "translation" else ["--tokens-per-sample", "512"]
    model = configuration(parse(["DATA", "--task", task, "--arch", arch, *length]))
    symbols = next(count for name, count in SYMBOLS.items() if name in arch)
    parameters = count_parameters(build(model, symbols))
    layers = f"{model.encoder_layers} + " if task == "translation" else ""
    inner = getattr(model, "persistent_vectors", 0) or model.decoder_ffn_embed_dim
    width, heads = model.decoder_embed_dim, model.decoder_attention_heads
    sizes = f"{layers}{model.decoder_layers}, {width}, {heads}, {inner}"
    if name == "all_attention_lm":
        sizes += f", {model.attention_span}"
    return f"| `{arch}` | {sizes} | {parameters:,} | "


def presets_page(page: str) -> str:
    """Return the text of docs/presets.md with new tables."""
    register()
    from fairseq.models import ARCH_MODEL_INV_REGISTRY

    remarks = dict(re.findall(r"^\| `(\w+)` .* \| (.*) \|$", page, re.MULTILINE))
    head = ["| `--arch` | layers, width, heads, inner width | parameters | |", "|---|---|---|---|"]
    rows = [
        f"{preset_row(arch, name)}{remarks.get(arch, '')} |"
        for name in TASKS
        for arch in ARCH_MODEL_INV_REGISTRY[name]
        if arch != name
    ]
    return TABLE.sub(lambda _: "".join(f"{row}\n" for row in [*head, *rows]), page)


def option_rows(config: type, left_out: Iterable[str] = ()) -> list[str]:
    """Return rows for a dataclass's options that have a help text, except those in ``left_out``."""
    rows = []
    for option in dataclasses.fields(config):
        text = option.metadata.get("help")
        from_task = "oc.select:task." in str(option.default)
        if from_task or option.name in {"_name", "data", *left_out} or not text:
            continue
        default = "" if option.default is None or option.default is False else option.default
        text = text.replace("|", "\\|")
        rows.append(f"| `--{option.name.replace('_', '-')}` | {default} | {text} |")
    return rows


def names(config: type) -> set[str]:
    """Return the names of the options of a dataclass."""
    return {option.name for option in dataclasses.fields(config)}


def options_page(page: str) -> str:
    """Return the text of docs/options.md with new tables."""
    register()
    from fairseq.criterions import CRITERION_DATACLASS_REGISTRY as CRITERIA
    from fairseq.models import MODEL_DATACLASS_REGISTRY as MODELS
    from fairseq.models.transformer import TransformerModel
    from fairseq.optim import OPTIMIZER_DATACLASS_REGISTRY as OPTIMIZERS
    from fairseq.tasks import TASK_DATACLASS_REGISTRY as TASKS

    parser = argparse.ArgumentParser()
    TransformerModel.add_args(parser)
    transformer_options = {action.dest for action in parser._actions}
    memory_options = names(MODELS["pkm_transformer_lm"]) - names(MODELS["transformer_lm"])
    transformer_xl, all_attention = (
        option_rows(MODELS[name], memory_options) for name in ("transformer_xl", "all_attention_lm")
    )
    tables = {
        "Task `segment_language_modeling`": option_rows(TASKS["segment_language_modeling"]),
        "Models `transformer_xl` and `all_attention_lm`": [
            row for row in transformer_xl if row in all_attention
        ],
        "Model `transformer_xl`": [row for row in transformer_xl if row not in all_attention],
        "Model `all_attention_lm`": [row for row in all_attention if row not in transformer_xl],
        "Criterion `segment_loss`, optimizer `adagrad_with_clip`": [
            *option_rows(CRITERIA["segment_loss"], names(CRITERIA["cross_entropy"])),
            *option_rows(OPTIMIZERS["adagrad_with_clip"]),
        ],
        "Product-key memory": [
            *option_rows(MODELS["pkm_transformer_lm"], names(MODELS["transformer_lm"])),
            *option_rows(MODELS["pkm_transformer"], transformer_options | memory_options),
            *option_rows(OPTIMIZERS["adam_with_memory"], names(OPTIMIZERS["adam"])),
        ],
        "Model `weighted_transformer`": option_rows(
            MODELS["weighted_transformer"], transformer_options
        ),
    }
    for title, rows in tables.items():
        table = "".join(f"{row}\n" for row in ["| option | default | |", "|---|---|---|", *rows])
        before, after = page.split(f"## {title}\n")
        page = f"{before}## {title}\n" + TABLE.sub(lambda _, new=table: new, after, count=1)
    return page


def write(output: Path) -> None:
    """Write both pages into a folder."""
    for name, page in (("options.md", options_page), ("presets.md", presets_page)):
        write_text(output / name, page((DOCS / name).read_text(encoding="utf-8")))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, default=DOCS, help=f"folder ({short(DOCS)})")
    output = parser.parse_args(arguments).output.resolve()
    return exit_status(lambda: write(output))


if __name__ == "__main__":
    sys.exit(main())
