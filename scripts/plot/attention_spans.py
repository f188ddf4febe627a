r"""Plot the learned attention spans of models: how far back each head of each layer sees.

    python -m scripts.plot.attention_spans --checkpoint all=checkpoint_best.pt --output spans

The span of a head is the number of previous tokens that its soft mask lets through, ramp included
(all-attention, section 4.3; Sukhbaatar et al. 2019, arXiv:1905.07799). Layers are numbered from 1,
next to the embeddings. Checkpoints, from any moment of a training, are drawn side by side.

Writes attention_spans.json and attention_spans.png, and prints a table.
"""

import argparse
import re
import sys
from typing import Any

from scripts._shared.checkpoints import load_checkpoint
from scripts._shared.command_line import (
    NamedFile,
    add_named_files,
    add_output_options,
    command_parser,
    exit_status,
    parse_named_files,
)
from scripts._shared.commands import short
from scripts._shared.results import markdown_table, prepare_results, save_results

_VALUE = re.compile(r"decoder\.network\.layers\.(\d+)\.self_attn\.span\.value")
# Share of a layer's width in the plot that its dots fill.
_FILLED = 0.7


def read_spans(checkpoint: NamedFile) -> dict[str, Any]:
    """Return the spans of all heads of a checkpoint, layer by layer, in tokens.

    "spans" are rounded up, because a head reads a token that its span reaches in part; "mean" and
    "largest" are as in the log of the training.
    """
    import torch

    from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan

    state = load_checkpoint(checkpoint.path)
    options = state["cfg"]["model"]
    largest, ramp = options.get("attention_span"), options.get("span_ramp")
    tokens = {}
    for name, value in state["model"].items():
        if found := _VALUE.fullmatch(name):
            span = AdaptiveSpan(len(value), largest, ramp)
            span.load_state_dict({"value": value})
            tokens[int(found[1]) + 1] = span.tokens()
    if not tokens:
        raise ValueError(
            f"--checkpoint {short(checkpoint.path)}: its model {options['_name']} has no adaptive "
            "spans; name a checkpoint of a model that was trained with --adaptive-span"
        )

    def figures(spans: torch.Tensor) -> dict[str, float]:
        return {"mean": spans.mean().item(), "largest": spans.max().item()}

    return {
        "model": checkpoint.label,
        "checkpoint": short(checkpoint.path),
        "updates": state["optimizer_history"][-1]["num_updates"],
        "attention_span": largest,
        "span_ramp": ramp,
        **figures(torch.cat(list(tokens.values()))),
        "layers": [
            {"layer": number, **figures(spans), "spans": spans.ceil().int().tolist()}
            for number, spans in sorted(tokens.items())
        ],
    }


def format_table(models: list[dict[str, Any]]) -> str:
    """Return the spans as a Markdown table with a row for each layer."""
    cells = [
        [
            model["model"],
            str(layer["layer"]),
            f"{layer['mean']:,.1f}",
            f"{layer['largest']:,.1f}",
            " ".join(map(str, layer["spans"])),
        ]
        for model in models
        for layer in model["layers"]
    ]
    headers = ["model", "layer", "mean span", "largest", "spans of the heads, tokens with ramp"]
    return markdown_table(headers, cells)


def draw(axes: Any, models: list[dict[str, Any]]) -> None:
    """Draw each head's span over its layer, with the layer's mean and largest as lines."""
    width = _FILLED / len(models)
    for index, model in enumerate(models):
        left = index * width - _FILLED / 2
        heads, layers = [], model["layers"]
        for layer in layers:
            step = width / (len(layer["spans"]) + 1)
            first = layer["layer"] + left + step
            heads += [(first + step * head, span) for head, span in enumerate(layer["spans"])]
        dots = axes.scatter(*zip(*heads, strict=True), s=10, label=f"{model['model']}, heads")
        color = dots.get_facecolor()
        middles = [layer["layer"] + left + width / 2 for layer in layers]
        for figure, style in (("mean", "-"), ("largest", ":")):
            label = f"{model['model']}, {figure}"
            lines = [layer[figure] for layer in layers]
            axes.plot(middles, lines, style, color=color, linewidth=1, label=label)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer")
    axes.set_ylabel("span (tokens, ramp included)")
    axes.grid(alpha=0.3)
    # above the plot, because the dots may be anywhere; one column per model
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(models), fontsize="small")


def plot_attention_spans(arguments: argparse.Namespace) -> None:
    """Read the spans and draw them."""
    models = list(map(read_spans, parse_named_files("--checkpoint", arguments.checkpoint)))
    prepare_results(arguments.output)
    text = [f"{format_table(models)}\n"]
    text += [
        f"{model['model']}, {model['updates']:,} updates: mean span {model['mean']:,.1f} tokens, "
        f"largest {model['largest']:,.1f} of {model['attention_span']:,}; "
        f"ramp {model['span_ramp']} included"
        for model in models
    ]
    content, text = {"models": models}, "\n".join(text)
    save_results(arguments.output, "attention_spans", content, text, lambda ax: draw(ax, models))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add_named_files(parser, "--checkpoint", "models")
    add_output_options(parser, "attention_spans", device=False)
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: plot_attention_spans(parsed), output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
