"""Write docs/options.md: every option of this package, as its dataclasses have it.

    python -m scripts.docs.options

The page is written anew each time: its help texts are those of the dataclasses, its headings
stand here.
"""

import dataclasses
import sys
from dataclasses import Field
from pathlib import Path
from typing import NamedTuple

from fairseq.criterions.cross_entropy import CrossEntropyCriterionConfig
from fairseq.dataclass import FairseqDataclass
from fairseq.optim.adam import FairseqAdamConfig

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClipConfig
from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.product_key_memory.model import MemoryTransformerOptions
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemoryConfig
from fairseq_plugins.product_key_memory.options import MemoryLayersOptions
from fairseq_plugins.segment_language_model.loss import SegmentLossConfig
from fairseq_plugins.segment_language_model.model_config import SegmentLanguageModelConfig
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingConfig
from fairseq_plugins.transformer_xl.model import TransformerXLConfig
from fairseq_plugins.weighted_transformer.options import BranchOptions
from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import ROOT, short
from scripts._shared.files import write_text

PAGE = ROOT / "docs" / "options.md"
INTRODUCTION = """# Options

Every option of this package, with its default; fairseq's own `--help` does not list those of tasks
and models. [presets.md](presets.md) has the sizes that `--arch` sets. `--model-overrides
"{'mem_len': 64}"`, with underscores in the names, changes options of a model at evaluation.

`python -m scripts.docs.options` writes this page."""


class Section(NamedTuple):
    """A table of the page.

    Attributes:
        title: its heading.
        text: what stands above the table.
        config: the dataclass whose options it lists.
        others: dataclasses whose options it leaves out, where they are the same.
    """

    title: str
    text: str
    config: type[FairseqDataclass]
    others: tuple[type[FairseqDataclass], ...] = ()


SECTIONS = [
    Section("Task `segment_language_modeling`", "", SegmentLanguageModelingConfig),
    Section(
        "Models `transformer_xl` and `all_attention_lm`",
        "Their memories have the options of [product-key memory](#product-key-memory), too.",
        SegmentLanguageModelConfig,
        (MemoryLayersOptions,),
    ),
    Section(
        "Model `transformer_xl`",
        "Its recurrence is by default as long as the segments in training, or 0 with absolute "
        "positions or `--extended-context`.",
        TransformerXLConfig,
        (SegmentLanguageModelConfig,),
    ),
    Section(
        "Model `all_attention_lm`",
        "Its recurrence is by default as long as its span.",
        AllAttentionConfig,
        (SegmentLanguageModelConfig,),
    ),
    Section(
        "Criterion `segment_loss`",
        "It has those of fairseq's `cross_entropy`, too.",
        SegmentLossConfig,
        (CrossEntropyCriterionConfig,),
    ),
    Section("Optimizer `adagrad_with_clip`", "", AdagradWithClipConfig),
    Section(
        "Product-key memory",
        "Of `pkm_transformer_lm`, `transformer_xl` and `all_attention_lm`. The first has those of "
        "fairseq's `transformer_lm`, too.",
        MemoryLayersOptions,
    ),
    Section(
        "Model `pkm_transformer`",
        "In place of `--memory-layers`; it has those of fairseq's `transformer`, too.",
        MemoryTransformerOptions,
        (MemoryLayersOptions,),
    ),
    Section(
        "Optimizer `adam_with_memory`",
        "It has those of fairseq's `adam`, too.",
        AdamWithMemoryConfig,
        (FairseqAdamConfig,),
    ),
    Section(
        "Model `weighted_transformer`",
        "It has those of fairseq's `transformer`, too; its optimizer `adam_with_branch_weights` "
        "those of `adam`.",
        BranchOptions,
    ),
]


def option_row(option: Field) -> str:
    """Row of a table for a field of a dataclass: name, default, help."""
    default = "" if option.default is None or option.default is False else option.default
    help_text = option.metadata["help"].replace("|", "\\|")
    return f"| `--{option.name.replace('_', '-')}` | {default} | {help_text} |"


def option_rows(config: type[FairseqDataclass]) -> list[str]:
    """Rows of all options of a dataclass that a user can give."""
    return [option_row(option) for option in dataclasses.fields(config) if is_option(option)]


def is_option(option: Field) -> bool:
    """Whether a field of a dataclass is an option with a help text."""
    return option.name not in ("_name", "data") and bool(option.metadata.get("help"))


def page() -> str:
    """Text of docs/options.md."""
    parts = [INTRODUCTION]
    for section in SECTIONS:
        left_out = {row for other in section.others for row in option_rows(other)}
        rows = [row for row in option_rows(section.config) if row not in left_out]
        table = "\n".join(["| option | default | |", "|---|---|---|", *rows])
        parts += [f"## {section.title}", *([section.text] if section.text else []), table]
    return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, help=f"file ({short(PAGE)})")
    output = parser.parse_args(arguments).output.resolve()
    return exit_status(lambda: write_text(output, page()))


if __name__ == "__main__":
    sys.exit(main())
