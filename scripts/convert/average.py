r"""One checkpoint whose weights are the mean of several ones of a training, for evaluation.

    python -m scripts.convert.average --checkpoint CHECKPOINTS/checkpoint[0-9]*.pt \
        --output CHECKPOINTS/checkpoint_average.pt

fairseq-train keeps the checkpoints of the last epochs with --keep-last-epochs, or every so many
updates with --save-interval-updates. Options and whole numbers are those of the newest checkpoint;
the state of the optimizer is left out. fairseq's repository has such a script, but its package
does not.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts._shared.checkpoints import read_checkpoint
from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import atomic_write


def updates_of(state: dict[str, Any]) -> int:
    """How many updates a checkpoint is of."""
    return state["optimizer_history"][-1]["num_updates"]


def read_training(paths: list[Path]) -> list[dict[str, Any]]:
    """Contents of the checkpoints of one training, in the order of their updates.

    Raises ValueError when a file is no such checkpoint, or two differ in what they hold.
    """
    if len(set(paths)) < 2:
        raise ValueError(f"--checkpoint names {len(set(paths))} file: name two or more to average")
    states = {}
    for path in paths:
        state = read_checkpoint(path)
        if not {"model", "optimizer_history"} <= set(state):
            raise ValueError(
                f"--checkpoint {short(path)} holds no model: name checkpoints that fairseq-train "
                "wrote"
            )
        states[path] = state
    shapes = {
        path: {name: weight.shape for name, weight in state["model"].items()}
        for path, state in states.items()
    }
    for path in paths[1:]:
        if shapes[path] != shapes[paths[0]]:
            raise ValueError(
                f"--checkpoint {short(path)} has other weights than {short(paths[0])}: name "
                "checkpoints of one training"
            )
    return sorted(states.values(), key=updates_of)


def average_weights(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of each weight, summed in double precision; whole numbers are the last model's."""
    averaged = {}
    for name, last in models[-1].items():
        if not last.is_floating_point():
            averaged[name] = last
            continue
        total = torch.zeros_like(last, dtype=torch.float64)
        for model in models:
            total += model[name]
        averaged[name] = (total / len(models)).to(last.dtype)
    return averaged


def average(arguments: argparse.Namespace) -> None:
    """Write the average; raises ValueError, before any output, for checkpoints of several runs."""
    states = read_training(arguments.checkpoint)
    newest = states[-1]
    newest["model"] = average_weights([state["model"] for state in states])
    newest["last_optimizer_state"] = None
    newest.get("extra_state", {}).get("train_iterator", {}).pop("memory", None)
    try:
        with atomic_write(arguments.output) as partial:
            torch.save(newest, partial)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"--output {short(arguments.output)} cannot be written ({error}): give a file in a "
            "folder where you may write and that has room"
        ) from error
    first, last = updates_of(states[0]), updates_of(newest)
    print(
        f"average of {len(states)} checkpoints, after {first:,} to {last:,} updates, written to "
        f"{short(arguments.output)}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    help_text = "checkpoints of one training, in any order"
    parser.add_argument("--checkpoint", type=Path, nargs="+", required=True, help=help_text)
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: average(parsed))


if __name__ == "__main__":
    sys.exit(main())
