r"""Average the weights of several checkpoints of one training.

    python -m scripts.convert.average CHECKPOINTS --last 5 --output CHECKPOINTS/average.pt
    python -m scripts.convert.average checkpoint8.pt checkpoint9.pt --output average.pt

--last N takes the N checkpoints in a folder with the most updates: checkpointEPOCH.pt and
checkpoint_EPOCH_UPDATES.pt, not the copies checkpoint_best.pt and checkpoint_last.pt.

The mean of each weight is computed in double precision. Spans stay within their range, and κ and α
of a Weighted Transformer stay on the simplex, since both sets are convex. The statistics of batch
norms of queries are averaged too. Counts and options come from the checkpoint with the most
updates. The result has no optimizer state: use it for evaluation or with --finetune-from-model.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts._shared.checkpoints import checkpoint_options, read_checkpoint, save_for_new_training
from scripts._shared.command_line import check_at_least, command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import atomic_write

if TYPE_CHECKING:
    from torch import Tensor

# Names of the checkpoints that fairseq-train keeps.
_NAMES = re.compile(r"checkpoint(\d+|_\d+_\d+)\.pt")


class Checkpoint(NamedTuple):
    """A checkpoint: its file, its content (tensors stay on the disk), its number of updates."""

    path: Path
    state: dict[str, Any]
    updates: int


def load(path: Path) -> Checkpoint:
    """Read a checkpoint; raises ValueError as read_checkpoint does, and if there is no model."""
    # importing torch takes seconds
    from torch import Tensor

    state = read_checkpoint(path, "CHECKPOINT")
    updates = (state.get("optimizer_history") or [{}])[-1].get("num_updates")
    weights = state.get("model")
    named = isinstance(weights, dict) and all(isinstance(x, Tensor) for x in weights.values())
    if not named or updates is None:
        raise ValueError(
            f"CHECKPOINT {short(path)} holds no model's weights: name one that fairseq-train wrote"
        )
    return Checkpoint(path, state, updates)


def choose(paths: list[Path], last: int | None) -> list[Checkpoint]:
    """Return the checkpoints to average, the one with the most updates last."""
    check_at_least(2, last=last)
    if last is None:
        folders = [short(path) for path in paths if path.is_dir()]
        if folders:
            raise ValueError(f"{folders[0]} is a folder: give --last, how many to average")
        if len(set(paths)) != len(paths) or len(paths) < 2:
            raise ValueError("give two or more different checkpoints, or a folder and --last")
        return sorted(map(load, paths), key=lambda checkpoint: checkpoint.updates)
    if len(paths) != 1 or not paths[0].is_dir():
        raise ValueError(f"--last {last} takes one folder: name the --save-dir of the training")
    # the weights at the end of an epoch may be saved under both names
    files = sorted(path for path in paths[0].iterdir() if _NAMES.fullmatch(path.name))
    different = {checkpoint.updates: checkpoint for checkpoint in map(load, files)}
    chosen = [different[updates] for updates in sorted(different)[-last:]]
    if len(chosen) < last:
        raise ValueError(
            f"--last is {last} and {short(paths[0])} has {len(different)} checkpoints: give fewer, "
            "or train without --no-epoch-checkpoints, or with --save-interval-updates"
        )
    return chosen


def _signature(state: dict[str, Any]) -> dict[str, Any]:
    """Return what a training's checkpoints share: model, task, dictionaries, shapes of weights."""
    signature = {part: checkpoint_options(state, part).get("_name") for part in ("model", "task")}
    for name, weight in state["model"].items():
        # digests of dictionaries are integers that stay the same
        digest = name.startswith("dictionary_version.")
        signature[name] = tuple(weight.tolist()) if digest else tuple(weight.shape)
    return signature


def check(checkpoints: list[Checkpoint]) -> None:
    """Raise ValueError for checkpoints of different trainings, copies, and non-finite weights."""
    first, *others = checkpoints
    expected = _signature(first.state)
    for checkpoint in others:
        both = f"{short(first.path)} and {short(checkpoint.path)}"
        actual = _signature(checkpoint.state)
        for name in {**expected, **actual}:
            if expected.get(name) != actual.get(name):
                raise ValueError(
                    f"{both} differ in {name}: {expected.get(name)} and {actual.get(name)}: give "
                    "checkpoints of one training"
                )
    for checkpoint in checkpoints:
        for name, weight in checkpoint.state["model"].items():
            if not weight.isfinite().all():
                raise ValueError(
                    f"{name} in {short(checkpoint.path)} has a number that is not finite: leave "
                    "that checkpoint out"
                )
    if len({checkpoint.updates for checkpoint in checkpoints}) < len(checkpoints):
        raise ValueError(
            "CHECKPOINT: two of them have as many updates, as a checkpoint and its copy do: leave "
            "one out"
        )


def average(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of each weight over models; integers are taken from the last model.

    Weights that share storage in all models, as tied embeddings do, share it in the mean.
    """
    by_storage: dict[tuple, Tensor] = {}
    means = {}
    for name in models[-1]:
        weights = [model[name] for model in models]
        storage = tuple((x.data_ptr(), x.shape, x.stride()) for x in weights)
        if storage not in by_storage:
            by_storage[storage] = weights[-1].clone()
            if weights[-1].is_floating_point():
                total = weights[0].double()
                for weight in weights[1:]:
                    total += weight
                by_storage[storage] = (total / len(weights)).to(weights[-1].dtype)
        means[name] = by_storage[storage]
    return means


def write_average(paths: list[Path], last: int | None, output: Path) -> None:
    """Average checkpoints and write the result to a file."""
    if output.exists():
        raise ValueError(f"--output {short(output)} already exists: name another, or remove it")
    if not output.parent.is_dir():
        raise ValueError(f"--output {short(output)}: its folder does not exist; make it first")
    checkpoints = choose(paths, last)
    check(checkpoints)
    newest = checkpoints[-1].state
    parts = ("args", "cfg", "criterion", "optimizer_history", "task_state")
    state = {
        **{part: newest[part] for part in parts if part in newest},
        "model": average([checkpoint.state["model"] for checkpoint in checkpoints]),
    }
    with atomic_write(output) as partial:
        save_for_new_training(state, partial)
    for checkpoint in checkpoints:
        print(f"{short(checkpoint.path)}: {checkpoint.updates:,} updates")
    print(f"the mean of {len(checkpoints)} checkpoints is written to {short(output)}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    help_text = "checkpoints, or with --last their folder"
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help=help_text)
    help_text = "average the N checkpoints with the most updates in the folder"
    parser.add_argument("--last", type=int, metavar="N", help=help_text)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parsed: argparse.Namespace = parser.parse_args(arguments)
    paths, output = [path.resolve() for path in parsed.checkpoints], parsed.output.resolve()
    return exit_status(lambda: write_average(paths, parsed.last, output), output=output)


if __name__ == "__main__":
    sys.exit(main())
