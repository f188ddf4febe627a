r"""Measure how much of their product-key memories models read (Lample et al. 2019, section 4.2).

    python -m scripts.evaluate.memory_usage --data FOLDER --split test --output memory_usage \
        --checkpoint plain=plain/checkpoint_best.pt norm=norm/checkpoint_best.pt

The measures are over all tokens of a split, and come with its perplexity:
usage         share of the slots that were read, by each memory and by each of its heads
KL            divergence of the reads from uniform reads, in nats: 0 if all slots are read equally

Works for models of fairseq's tasks language_modeling and translation, and for segment language
models. If a token of the split is not scored exactly once, there is an error. Reads of padding do
not count. An encoder's memories count the tokens of the source. Layers are numbered from 1.

Writes memory_usage.json and prints tables.
"""

import argparse
import math
import sys
import warnings
from typing import Any

from scripts._shared.command_line import (
    NamedFile,
    add_text_options,
    check_at_least,
    command_parser,
    exit_status,
    parse_named_files,
)
from scripts._shared.commands import short
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line
from scripts._shared.results import markdown_table


def measure(checkpoint: NamedFile, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a model's loss and the statistics of its memories over a split.

    The memories are called ``memory6`` for layer 6 of a language model, ``encoder_memory3`` or
    ``decoder_memory3`` if there is an encoder.
    """
    import numpy as np

    from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
    from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
    from fairseq_plugins.python_interface.loading import load
    from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
    from scripts._shared.layer_reads import Layer, Reads, layers, record
    from scripts.evaluate._scoring import choose_device

    # load refuses the option for a translation model
    sizes = {"tokens_per_sample": arguments.tokens_per_sample}
    loaded = load(checkpoint.path, arguments.data, **sizes).to(choose_device(arguments.cpu))

    def name(layer: Layer) -> str:
        part = f"{layer.part}_" if hasattr(loaded.model, "encoder") else ""
        return f"{part}memory{layer.number}"

    memories = {
        name(layer): MemoryUsage(len(layer.module.values.weight), layer.module.heads)
        for layer in layers(loaded.model, ProductKeyMemory)
    }
    if not memories:
        raise ValueError(
            f"--checkpoint {short(checkpoint.path)} holds a model without product-key memories: "
            "name one that was trained with --memory-layers, --encoder-memory-layers or "
            "--decoder-memory-layers"
        )
    pad = loaded.task.source_dictionary.pad()
    # tokens are (B, T) in segment language models, (T, B) in fairseq's models
    by_row = isinstance(loaded.task, SegmentLanguageModelingTask)
    counted: Any = None

    def count_scored(batch: dict[str, Any], scored: Any) -> None:
        nonlocal counted
        net_input = batch["net_input"]
        text = net_input.get("prev_output_tokens", net_input["src_tokens"]).ne(pad)
        counted = scored[text] if by_row else scored.t()[text.t()]

    def see(layer: Layer, reads: Reads) -> None:
        # an encoder reads the source, which is not scored
        tokens = slice(None) if layer.part == "encoder" else counted
        memories[name(layer)].record(reads.slots[tokens], reads.slot_weights[tokens])

    # torch warns about fairseq's own attention in every batch with padding
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")
    options = {"batch_size": arguments.batch_size} if arguments.batch_size else {}
    options |= {"before_batch": count_scored, "description": f"scoring {checkpoint.label}"}
    with record(loaded.model, see, ProductKeyMemory):
        losses = loaded.score_split(arguments.split, **options)
    loss = float(losses.mean(dtype=np.float64))
    return {
        "model": checkpoint.label,
        "checkpoint": short(checkpoint.path),
        "tokens": len(losses),
        "loss": loss,
        "perplexity": math.exp(loss),
        "memories": {
            # shares as fractions of 1, the divergence in nats
            label: {
                "slots": len(memory.total()),
                "heads": len(memory.reads),
                "tokens": memory.tokens,
                "usage": usage(memory.total()),
                "kl": kl_from_uniform(memory.total()),
                "usage_of_heads": [usage(head) for head in memory.reads],
            }
            for label, memory in memories.items()
        },
    }


def format_tables(models: list[dict[str, Any]]) -> str:
    """Return Markdown tables of losses and of memories."""
    losses, figures = [], []
    for model in models:
        label, loss = model["model"], f"{model['loss']:.4f}"
        losses.append([label, f"{model['tokens']:,}", loss, f"{model['perplexity']:.2f}"])
        for name, memory in model["memories"].items():
            heads = " ".join(f"{100 * share:.2f}" for share in memory["usage_of_heads"])
            row = [f"{memory['slots']:,}", f"{100 * memory['usage']:.2f}", f"{memory['kl']:.4f}"]
            figures.append([label, name, *row, heads])
    headers = ["model", "memory", "slots", "usage, %", "KL, nats", "usage of heads, %"]
    table = markdown_table(["model", "tokens", "loss, nats", "perplexity"], losses)
    return f"{table}\n\n{markdown_table(headers, figures)}"


def measure_memory_usage(arguments: argparse.Namespace) -> None:
    """Measure each model."""
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    check_at_least(1, batch_size=arguments.batch_size)
    from scripts.evaluate._scoring import choose_device

    hardware = hardware_line(choose_device(arguments.cpu))
    data, split = short(arguments.data.resolve()), arguments.split
    arguments.output.mkdir(parents=True, exist_ok=True)
    print(f"{split} of {data}, on {hardware}\n", flush=True)
    models: list[dict[str, Any]] = []
    sizes = {name: getattr(arguments, name) for name in ("batch_size", "tokens_per_sample")}
    result = {"data": data, "split": split, **sizes, "hardware": hardware, "models": models}
    for checkpoint in checkpoints:
        models.append(measure(checkpoint, arguments))
        write_json(arguments.output / "memory_usage.json", result)
    print(format_tables(models))
    print(f"\nwritten to {short(arguments.output.resolve())}/memory_usage.json")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add_text_options(parser, "memory_usage")
    help_text = (
        "blocks or sentence pairs in a batch (8), or parallel streams of a segment language model "
        "(1, which gives the exact loss of the whole text)"
    )
    parser.add_argument("--batch-size", type=int, help=help_text)
    help_text = "length of a block or segment (as in training)"
    parser.add_argument("--tokens-per-sample", type=int, help=help_text)
    parsed = parser.parse_args(arguments)
    file = f"{short(parsed.output.resolve())}/memory_usage.json"
    interrupted = f"{file} keeps the models so far"
    return exit_status(lambda: measure_memory_usage(parsed), interrupted, parsed.output)


if __name__ == "__main__":
    sys.exit(main())
