r"""How much of their product-key memories trained models read (Lample et al. 2019, section 4.2).

    python -m scripts.evaluate.memory_usage --data FOLDER --split test --output memory_usage \
        --checkpoint plain=plain/checkpoint_best.pt norm=norm/checkpoint_best.pt

Over all tokens of a split, with the perplexity that they had there:
usage         share of the slots that were read, of each memory and of each of its heads
KL            divergence of the reads from uniform ones, in nats: 0 where all slots are read alike
half, 90%     how many slots, the most read ones, have that share of all reads
overlap       share of the slots that a token reads with one head which it reads with another too
              (section 3.3), and of the slots that one head reads at all, those of another

Takes models of fairseq's tasks language_modeling and translation, and segment language models. Each
token of the split is scored once, or there is an error; of a context that is read again
(--context-window) the reads do not count, nor those of padding. Memories of an encoder count the
tokens of the source. Layers count from 1.

Writes memory_usage.json and memory_usage.png, and prints tables. With --rarely-read SHARE of one
model, rarely_read.npz too: that share of each memory's slots, those that were read least, which
fairseq-train --memory-trainable-slots rarely_read.npz trains alone.
"""

import argparse
import math
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations, cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.tasks.translation import TranslationTask
from torch import Tensor, nn

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from fairseq_plugins.python_interface.loading import load, task_of
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from scripts._shared.checkpoints import read_checkpoint
from scripts._shared.command_line import (
    NamedFile,
    add_text_options,
    check_at_least,
    command_parser,
    exit_status,
    parse_named_files,
)
from scripts._shared.commands import short
from scripts._shared.files import atomic_write, write_json
from scripts._shared.machine import hardware_line
from scripts._shared.results import markdown_table, prepare_results, save_results
from scripts.evaluate._splits import choose_device

# Shares of all reads of which the slots that carry them are counted.
SHARES = (0.5, 0.9)
OVERLAPS = {
    "overlap_of_tokens": "a token reads with a head (row), those it reads with another too",
    "overlap_of_slots": "a head (row) reads for any token, those that another reads too",
}
# At most so many slots are kept of the curve from the most read to the least read one.
_POINTS = 200
_PLACE = re.compile(r"(encoder|decoder)\.layers\.(\d+)\.")
# Memories of a model have its colour, each a style of its own.
_STYLES = ("-", "--", ":", "-.")


class MemoryReads(MemoryUsage):
    """The weights with which the slots of one memory were read, and the slots that heads share.

    Args:
        slots: K.
        heads: H.

    Attributes:
        counted: of the next reads, only those of the tokens that are true here, (N,); None for all.
    """

    def __init__(self, slots: int, heads: int) -> None:
        super().__init__(slots, heads, by_head=True)
        self.counted: Tensor | None = None
        self.knn = 0
        # slots that head i and head j both read for the same token, added up: (H, H)
        self._shared = torch.zeros(heads, heads, dtype=torch.long)

    def record(self, slots: Tensor, weights: Tensor, tokens: Tensor | None = None) -> None:
        """Add the reads of ``slots`` with ``weights``, both (N, H, k), of ``tokens`` (N,)."""
        if tokens is not None:
            slots, weights = slots[tokens], weights[tokens]
        if self.counted is not None:
            slots, weights = slots[self.counted], weights[self.counted]
        super().record(slots, weights)
        self.knn = slots.size(-1)
        self._shared = self._shared.to(slots.device)
        for one, other in combinations(range(self.heads), 2):
            # a head reads a slot once at most: what is there twice is of both
            both = torch.cat([slots[:, one], slots[:, other]], dim=-1).sort(dim=-1).values
            shared = (both[:, 1:] == both[:, :-1]).sum()
            self._shared[one, other] += shared
            self._shared[other, one] += shared

    def clear(self) -> None:
        """Forget all reads."""
        super().clear()
        self._shared.zero_()

    def rarely_read(self, share: float) -> Tensor:
        """Return whether each slot is one of the ``share`` of all that are read least, (K,).

        Of slots that are read alike the later ones count as read more.
        """
        reads = self.reads.sum(0)
        least = reads.argsort(stable=True)[: round(share * len(reads))]
        return torch.zeros(len(reads), dtype=torch.bool).index_fill_(0, least.cpu(), True)

    def overlap_of_tokens(self) -> Tensor:
        """Return which share of the k slots that a token reads with head i it reads with j: (H, H).

        It is the mean over the tokens, and the same for j and i.
        """
        shares = self._shared.double() / (self.tokens * self.knn)
        return shares.fill_diagonal_(1)

    def overlap_of_slots(self) -> Tensor:
        """Return which share of the slots that head i reads at all head j reads too: (H, H)."""
        used = (self.reads > 0).double()
        return used @ used.t() / used.sum(1, keepdim=True)

    def describe(self) -> dict[str, Any]:
        """Return all figures of the memory: shares are fractions of 1, the divergence in nats."""
        reads = self.total()
        return {
            "slots": len(reads),
            "heads": self.heads,
            "knn": self.knn,
            "tokens": self.tokens,
            "usage": usage(reads),
            "kl": kl_from_uniform(reads),
            "usage_of_heads": [usage(of_head) for of_head in self.reads],
            "slots_with_share": {str(share): slots_that_carry(reads, share) for share in SHARES},
            "overlap_of_tokens": self.overlap_of_tokens().tolist(),
            "overlap_of_slots": self.overlap_of_slots().tolist(),
            "curve": curve(reads),
        }


def slots_that_carry(reads: Tensor, share: float) -> int:
    """Return how many of the most read slots have ``share`` of all reads, given z' (K,)."""
    carried = reads.sort(descending=True).values.cumsum(0)
    # sums that should be equal differ in their last digits
    return int((carried < share * carried[-1] * (1 - 1e-9)).sum()) + 1


def curve(reads: Tensor) -> dict[str, list]:
    """Return some of the slots of z' (K,) that were read, most read first: ranks from 1, weights.

    A weight is z_i · K: 1 for a slot that is read as often as if all were read alike.
    """
    read = reads[reads > 0].sort(descending=True).values
    ranks = np.unique(np.geomspace(1, len(read), _POINTS).round().astype(int))
    weights = read[torch.from_numpy(ranks - 1).to(read.device)] * len(reads) / reads.sum()
    return {"rank": ranks.tolist(), "weight": weights.tolist()}


@contextmanager
def record_usage(model: nn.Module) -> Iterator[dict[str, MemoryReads]]:
    """Record what the memories of ``model`` read in the block: by name, as validation logs them.

    The names are ``memory6`` for layer 6 of a language model, ``encoder_memory3`` or
    ``decoder_memory3`` where there is an encoder. Raises ValueError for a model without memories.
    """
    recorded: dict[str, MemoryReads] = {}
    with ExitStack() as stack:
        for path, memory in model.named_modules():
            if isinstance(memory, ProductKeyMemory):
                reads = recorded[_name(model, path)] = MemoryReads(len(memory.values), memory.heads)
                hook = partial(_record, reads)
                # memory.usage belongs to validation, which takes it away after each batch
                stack.enter_context(memory.keys.register_forward_hook(hook))
        if not recorded:
            raise ValueError(
                f"{type(model).__name__} has no product-key memory to record: take a model that "
                "was trained with --memory-layers, --encoder-memory-layers or "
                "--decoder-memory-layers"
            )
        yield recorded


def _name(model: nn.Module, path: str) -> str:
    place = _PLACE.search(path)
    if place is None:
        return path
    part = f"{place[1]}_" if hasattr(model, "encoder") else ""
    return f"{part}memory{int(place[2]) + 1}"


def _record(reads: MemoryReads, _: nn.Module, inputs: Any, found: tuple[Tensor, Tensor]) -> None:
    scores, slots = found
    reads.record(slots, scores.detach().softmax(-1))


def check_inputs(checkpoint: NamedFile, data: Path, options: dict[str, Any]) -> None:
    """Look at what a measurement is of, before any work."""
    label = f"--checkpoint {short(checkpoint.path)}"
    state = read_checkpoint(checkpoint.path)
    translates = issubclass(task_of(state, label), TranslationTask)
    if not any(weight.endswith("memory.values") for weight in state.get("model") or ()):
        trained = "--encoder-memory-layers or --decoder-memory-layers"
        raise ValueError(
            f"{label} holds a model without product-key memories: name one that was trained with "
            f"{trained if translates else '--memory-layers'}"
        )
    for name in ("tokens_per_sample", "context_window"):
        if translates and options[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} is {options[name]} for a translation model, which "
                "reads sentence by sentence: leave it out"
            )
    if not data.is_dir():
        raise ValueError(f"--data {data} is no folder: name the one that fairseq-preprocess wrote")


def measure(
    checkpoint: NamedFile, data: Path, split: str, options: dict[str, Any], device: torch.device
) -> tuple[dict[str, Any], dict[str, MemoryReads]]:
    """Loss of a model and the figures of its memories over a split, and the reads themselves.

    Args:
        checkpoint: the model.
        data: folder of the split.
        split: its name.
        options: of :meth:`LoadedModel.score_split`.
        device: where to compute.
    """
    loaded = load(checkpoint.path, data).to(device)
    pad, sources = loaded.task.source_dictionary.pad(), 0
    # (B, T) in segment models, (T, B) in fairseq's
    by_row = isinstance(loaded.task, SegmentLanguageModelingTask)
    with record_usage(loaded.model) as memories:
        in_decoder = [memories[name] for name in memories if not name.startswith("encoder")]

        def count_only(batch: dict[str, Any], scored: Tensor) -> None:
            nonlocal sources
            net_input = batch["net_input"]
            sources += int(net_input["src_tokens"].ne(pad).sum())
            read = net_input.get("prev_output_tokens", net_input["src_tokens"]).ne(pad)
            counted = scored[read] if by_row else scored.t()[read.t()]
            for memory in in_decoder:
                memory.counted = counted

        label = f"scoring {checkpoint.label}"
        losses = loaded.score_split(split, before_batch=count_only, description=label, **options)
    for name, memory in memories.items():
        expected = len(losses) if memory in in_decoder else sources
        if memory.tokens != expected:
            raise ValueError(
                f"{name} of --checkpoint {short(checkpoint.path)} read for {memory.tokens:,} "
                f"tokens of the {expected:,} of --split {split}, so the figures would be wrong: "
                "use the versions of fairseq and of this plugin that belong together"
            )
    loss = float(losses.mean(dtype=np.float64))
    figures = {
        "model": checkpoint.label,
        "checkpoint": short(checkpoint.path),
        "tokens": len(losses),
        "loss": loss,
        "perplexity": math.exp(loss),
        "memories": {name: memory.describe() for name, memory in memories.items()},
    }
    return figures, memories


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


def _memories(models: list[dict[str, Any]]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (model["model"], name, memory)
        for model in models
        for name, memory in model["memories"].items()
    ]


def format_models(models: list[dict[str, Any]]) -> str:
    """Table of the losses in Markdown."""
    rows = [
        [row["model"], f"{row['tokens']:,}", f"{row['loss']:.4f}", f"{row['perplexity']:.2f}"]
        for row in models
    ]
    return markdown_table(["model", "tokens", "loss, nats", "perplexity"], rows)


def format_memories(models: list[dict[str, Any]]) -> str:
    """Table of the memories in Markdown, a row a memory."""
    rows = [
        [
            *(
                model,
                name,
                f"{memory['slots']:,}",
                _percent(memory["usage"]),
                f"{memory['kl']:.4f}",
            ),
            *(f"{memory['slots_with_share'][str(share)]:,}" for share in SHARES),
            " ".join(map(_percent, memory["usage_of_heads"])),
        ]
        for model, name, memory in _memories(models)
    ]
    shares = [f"slots with {share:.0%} of reads" for share in SHARES]
    headers = ["model", "memory", "slots", "usage, %", "KL, nats", *shares, "usage of heads, %"]
    return markdown_table(headers, rows)


def format_overlap(models: list[dict[str, Any]], kind: str) -> str | None:
    """Table of one of OVERLAPS in Markdown, a row a head; None where no memory has two heads."""
    several = [row for row in _memories(models) if row[2]["heads"] > 1]
    if not several:
        return None
    most = max(memory["heads"] for _, _, memory in several)
    rows = [
        [model, name, str(head), *map(_percent, shares)]
        for model, name, memory in several
        for head, shares in enumerate(memory[kind], start=1)
    ]
    others = [f"in head {head}, %" for head in range(1, most + 1)]
    return markdown_table(["model", "memory", "head", *others], rows)


def format_all(models: list[dict[str, Any]]) -> str:
    """All tables, and the overlap that there would be by chance."""
    told = [format_models(models), format_memories(models)]
    for kind, meaning in OVERLAPS.items():
        if table := format_overlap(models, kind):
            told += [f"Of the slots that {meaning}:", table]
    by_chance = {
        f"{memory['knn']} of {memory['slots']:,}, {100 * memory['knn'] / memory['slots']:.2g}%"
        for _, _, memory in _memories(models)
        if memory["heads"] > 1
    }
    if by_chance:
        shared = "; ".join(sorted(by_chance))
        told.append(f"By chance a token's slots of two heads would share {shared}")
    return "\n\n".join(told)


def draw(axes: Any, models: list[dict[str, Any]]) -> None:
    """Draw the weight of each slot, most read first: a line a memory, a colour a model."""
    for number, model in enumerate(models):
        for style, (name, memory) in zip(cycle(_STYLES), model["memories"].items(), strict=False):
            ranks, weights = memory["curve"]["rank"], memory["curve"]["weight"]
            label = f"{model['model']}, {name}: {100 * memory['usage']:.1f}% used"
            # a memory may have one slot that was read
            look = {"color": f"C{number % 10}", "marker": "." if len(ranks) == 1 else None}
            axes.plot(ranks, weights, style, **look, label=label)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("slots that were read, the most read first")
    axes.set_ylabel("reads (1: as if all slots were read alike)")
    axes.grid(alpha=0.3)
    # lines fall from the left to the right
    axes.legend(loc="best", fontsize="x-small")


def measure_memory_usage(arguments: argparse.Namespace) -> None:
    """Measure each model."""
    checkpoints = parse_named_files("--checkpoint", arguments.checkpoint)
    data, split = arguments.data.resolve(), arguments.split
    names = ("batch_size", "tokens_per_sample", "context_window")
    options = {name: getattr(arguments, name) for name in names}
    check_at_least(1, **{name: options[name] for name in names[:2]})
    check_at_least(0, context_window=arguments.context_window)
    if arguments.rarely_read is not None:
        if not 0 < arguments.rarely_read <= 1:
            raise ValueError(
                f"--rarely-read is {arguments.rarely_read}: it is a share of the slots, above 0 "
                "and at most 1"
            )
        if len(checkpoints) > 1:
            raise ValueError(
                f"--rarely-read with {len(checkpoints)} models: its file is of one; give one "
                "--checkpoint"
            )
    for checkpoint in checkpoints:
        check_inputs(checkpoint, data, options)
    device = choose_device(arguments.cpu)
    prepare_results(arguments.output)
    hardware = hardware_line(device)
    print(f"{split} of {short(data)}, on {hardware}\n", flush=True)
    # fairseq's own attention has torch warn in every batch with padding
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")
    models: list[dict[str, Any]] = []
    conditions = {"data": short(data), "split": split, **options}
    result = {**conditions, "hardware": hardware, "models": models}
    given = {name: value for name, value in options.items() if value}
    for checkpoint in checkpoints:
        figures, memories = measure(checkpoint, data, split, given, device)
        models.append(figures)
        write_json(arguments.output / "memory_usage.json", result)
    if arguments.rarely_read is not None:
        rare = {name: reads.rarely_read(arguments.rarely_read) for name, reads in memories.items()}
        arrays = {name: slots.numpy() for name, slots in rare.items()}
        with (
            atomic_write(arguments.output / "rarely_read.npz") as partial_file,
            partial_file.open("wb") as file,
        ):
            np.savez(file, **arrays)
    told = f"{format_all(models)}\n"
    save_results(arguments.output, "memory_usage", result, told, lambda axes: draw(axes, models))


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add_text_options(parser, "memory_usage")
    help_text = (
        "blocks or pairs of sentences at once (8), or parallel streams of a segment language model "
        "(1, which gives the exact figure of the whole text)"
    )
    add("--batch-size", type=int, help=help_text)
    add("--tokens-per-sample", type=int, help="length of a block or segment (as in training)")
    help_text = "tokens of a block that are read again, as context, and not scored (0)"
    add("--context-window", type=int, default=0, help=help_text)
    help_text = "write which slots are this share of all that was read least, such as 0.1"
    add("--rarely-read", type=float, metavar="SHARE", help=help_text)
    parsed = parser.parse_args(arguments)
    kept = f"{short(parsed.output.resolve())}/memory_usage.json keeps the models so far"
    return exit_status(lambda: measure_memory_usage(parsed), kept, parsed.output)


if __name__ == "__main__":
    sys.exit(main())
