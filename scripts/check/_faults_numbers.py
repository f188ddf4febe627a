"""Numbers that are not finite on the way: constraints hold, and no checkpoint has one of them.

In single precision fairseq ends a training at such a gradient, with its own words; under fp16 it
leaves the update out and goes on.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.check._faults_materials import TRAININGS, Materials
from scripts.check._faults_programs import Case, CaseFailedError, read_tensors, run

UPDATES = 8
# on a CPU fairseq cannot flatten gradients
HALF = ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale")
# What goes wrong, from which call of backward on, in how many of them; and the options.
FAULTS: dict[str, tuple[float, int, tuple[Any, ...]]] = {
    "a gradient of NaN": (float("nan"), 5, ()),
    "an infinite gradient": (float("inf"), 5, ()),
    "a gradient of NaN under fp16": (float("nan"), 5, (*HALF, 4)),
    "an infinite gradient under fp16": (float("inf"), 5, (*HALF, 4)),
    "a gradient of NaN in a part of an update under fp16": (
        float("nan"),
        5,
        (*HALF, 4, "--update-freq", 2),
    ),
    "a scale that overflows under fp16": (
        1.0,
        0,
        (*HALF, 2**24, "--fp16-scale-window", 4),
    ),
    "such a scale with accumulation": (
        1.0,
        0,
        (*HALF, 2**24, "--update-freq", 2),
    ),
    "a gradient of NaN under bf16": (float("nan"), 5, ("--bf16",)),
}


def stay_on_cpu() -> None:
    """Let a number that fairseq moves to the GPU when it leaves an update out stay where it is."""
    torch.Tensor.cuda = lambda number: number


def spoil(factor: float, at: int) -> Callable[[], None]:
    """Multiply the gradients of one call of backward, counted from 1, by a factor."""

    def inject() -> None:
        stay_on_cpu()
        backward, count = torch.Tensor.backward, [0]

        def spoiled(loss: torch.Tensor, *args: Any, **options: Any) -> None:
            count[0] += 1
            backward(loss * factor if count[0] == at else loss, *args, **options)

        torch.Tensor.backward = spoiled

    return inject


def check_state(path: Path) -> None:
    """Raise CaseFailedError for a checkpoint with a number that is not finite or out of bounds."""
    for name, value in read_tensors(path).items():
        if not name.startswith(("/model", "/last_optimizer_state")):
            continue
        if value.is_floating_point() and not value.isfinite().all():
            raise CaseFailedError(f"{path.name}: {name} is not finite")
        if name.endswith("span.value") and not ((value >= 0) & (value <= 1)).all():
            raise CaseFailedError(f"{path.name}: {name} is not between 0 and 1")
        if name.endswith((".kappa", ".alpha")):
            # half precision has three digits
            most = 1e-5 if value.dtype.itemsize > 2 else 0.01
            if (value < 0).any() or abs(float(value.float().sum()) - 1) > most:
                raise CaseFailedError(f"{path.name}: {name} is not on the simplex")


def train(
    materials: Materials, paper: str, fault: tuple[float, int, tuple[Any, ...]], folder: Path
) -> None:
    """Train with a fault, then without it in the same folder; raises CaseFailedError."""
    factor, at, options = fault
    output = folder / "model"
    frequent = ("--save-interval-updates", 1, "--keep-interval-updates", 3)
    words = materials.training(paper, output, "--max-update", UPDATES, *frequent, *options)
    outcome = run(words, folder, inject=spoil(factor, at))
    if options and "--bf16" not in options:
        if outcome.status != 0:
            raise CaseFailedError(f"it ends with exit status {outcome.status}: {outcome.last}")
    elif outcome.status == 0:
        raise CaseFailedError("it goes on with gradients that are not finite")
    elif "gradients are Nan/Inf" not in outcome.printed:
        raise CaseFailedError(f"it does not say why it ends: {outcome.last}")
    for path in sorted(output.glob("checkpoint*.pt")):
        check_state(path)
    again = run(words, folder / "again", inject=stay_on_cpu)
    if again.status != 0:
        raise CaseFailedError(f"it does not go on afterwards: {again.last}")
    check_state(output / "checkpoint_last.pt")


def cases(materials: Materials, quick: bool, draw: random.Random) -> Iterator[Case]:
    """All faults in all trainings, or some of them."""

    def case(paper: str, name: str) -> Case:
        return Case(
            f"{paper}: {name}", lambda folder: train(materials, paper, FAULTS[name], folder)
        )

    found = [case(paper, name) for paper in TRAININGS for name in FAULTS]
    yield from draw.sample(found, 4) if quick else found
