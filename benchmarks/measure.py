"""How a case of a benchmark is measured: outputs are compared, turns timed, memory found alone."""

import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.machine import multiply_add_rate, seconds_of

DTYPES = FP32, BF16, AUTOCAST = ("fp32", "bf16", "bf16-autocast")
PUBLISHED = "published code"
TRAINING, EVALUATION = "training", "evaluation"


class Entry(NamedTuple):
    """What takes part in a case: a model in one of :data:`DTYPES`."""

    model: str
    dtype: str

    def prepare(self, module: nn.Module, device: torch.device) -> nn.Module:
        """Return the module on a device, with weights of the dtype."""
        return module.to(device, torch.bfloat16 if self.dtype == BF16 else None)

    @contextmanager
    def precision(self, device: torch.device, training: bool = True):
        """Compute in the dtype within the block, in training with gradients."""
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.dtype == AUTOCAST)
        with torch.set_grad_enabled(training), autocast:
            yield


class Work(NamedTuple):
    """What an entry does: a turn, which is timed, and outputs (N, …), which are compared."""

    turn: Callable[[], object]
    outputs: Callable[[], Tensor]


@dataclass
class Row:
    """What was measured of an entry.

    Args:
        paper: of the case.
        case: its name.
        mode: what a turn does.
        model: of the entry.
        dtype: of the entry.
        tokens: of a turn.
        peak_bytes: the most that the entry holds, with its weights, in a separate process.
        multiply_adds: in a turn's matrix products, as torch.utils.flop_counter counts them.
        of_rate: their time at the measured rate of a large matrix product, as a part of the turn.
        seconds: of each turn.
        times: how many times as fast ours is: this row's median over that of ours.
    """

    paper: str
    case: str
    mode: str
    model: str
    dtype: str
    tokens: int
    peak_bytes: int = 0
    multiply_adds: int = 0
    of_rate: float = 0.0
    seconds: list[float] = field(default_factory=list)
    times: float | None = None

    @property
    def median(self) -> float:
        """Seconds of the median turn."""
        return statistics.median(self.seconds)


class Case(ABC):
    """Models that do the same work side by side: a row of the table of cases.

    Args:
        name: of the case.
        mode: TRAINING, EVALUATION or the like.
        tokens: that a turn reads.
        title: what a plot calls the model; "" keeps the case from plots.
    """

    paper: ClassVar[str]
    # the first model is this package's
    models: ClassVar[tuple[str, ...]]
    # models that must compute what the first one does
    same: ClassVar[tuple[str, ...]] = (PUBLISHED,)
    # in fp32, of all but a few outputs
    tolerance: ClassVar[float] = 2e-4
    agreeing: ClassVar[float] = 1.0

    def __init__(self, name: str, mode: str, tokens: int, title: str = "") -> None:
        self.name, self.mode, self.tokens, self.title = name, mode, tokens, title

    @abstractmethod
    def build(
        self, entries: Sequence[Entry], device: torch.device, published: Mapping[str, Any]
    ) -> list[Work]:
        """Return what the entries do, with the same weights and inputs, always the same ones.

        Args:
            entries: of the case.
            device: where they compute.
            published: the classes of the published code that are there, by paper.
        """

    def entries(self, dtypes: Sequence[str], published: Mapping[str, Any]) -> list[Entry]:
        """Who takes part: the published code in fp32 and, beside bf16 of any kind, autocast."""
        chosen = [Entry(model, dtype) for dtype in dtypes for model in self.present()]
        if self.paper in published:
            theirs = [FP32] if list(dtypes) == [FP32] else [FP32, AUTOCAST]
            chosen += [Entry(PUBLISHED, dtype) for dtype in theirs]
        return chosen

    def present(self) -> list[str]:
        """Models that can be built here, but the published code."""
        return list(self.models)

    def __str__(self) -> str:
        return f"{self.paper}: {self.name}, {self.mode}"


class Machine:
    """The device that computes, and the rate of its matrix products.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rates: dict[str, float] = {}

    def rate(self, dtype: str) -> float:
        """Multiply-adds a second of a large matrix product in the dtype."""
        of = "float32" if dtype == FP32 else "bfloat16"
        if of not in self.rates:
            self.rates[of] = multiply_add_rate(getattr(torch, of), self.device)
        return self.rates[of]


def largest_difference(
    case: Case, published: Mapping[str, Any], device: torch.device
) -> dict[str, float]:
    """How much each model that must compute what ours does differs from it, in fp32.

    Raises ValueError when that is more than the case's tolerance.
    """
    present = case.entries([FP32], published)
    others = [entry for entry in present if entry.model in case.same]
    if not others:
        return {}
    ours, *theirs = [
        work.outputs().flatten(1) for work in case.build([present[0], *others], device, published)
    ]
    found = {}
    for entry, outputs in zip(others, theirs, strict=True):
        of_rows = (ours - outputs).abs().amax(1).sort().values
        found[entry.model] = of_rows[int(case.agreeing * (len(of_rows) - 1))].item()
        # not a number is not within it either
        if not found[entry.model] <= case.tolerance:
            remedy = "; give an unchanged checkout" if entry.model.startswith(PUBLISHED) else ""
            raise ValueError(
                f"{case}: {entry.model} differs from {ours_of(case)} by {found[entry.model]:.2g} "
                f"with the same weights, allowed is {case.tolerance}: what computes other things "
                f"is not compared{remedy}"
            )
    return found


def ours_of(case: Case) -> str:
    """The model that is this package's."""
    return case.models[0]


def measure(
    case: Case,
    dtypes: Sequence[str],
    published: Mapping[str, Any],
    machine: Machine,
    turns: int,
    memory_of: Callable[[Case, Entry], int],
) -> list[Row]:
    """Time the entries of a case, which take turns, A B C A B C, after one that warms up."""
    entries = case.entries(dtypes, published)
    rows = [
        Row(case.paper, case.name, case.mode, *entry, case.tokens, memory_of(case, entry))
        for entry in entries
    ]
    works = case.build(entries, machine.device, published)
    for row, work in zip(rows, works, strict=True):
        with FlopCounterMode(display=False) as counter:
            work.turn()
        row.multiply_adds = counter.get_total_flops() // 2
    for _ in range(turns):
        for row, work in zip(rows, works, strict=True):
            row.seconds.append(seconds_of(work.turn))
    ours = {row.dtype: row.median for row in rows if row.model == ours_of(case)}
    for row in rows:
        row.of_rate = row.multiply_adds / machine.rate(row.dtype) / row.median
        if row.model != ours_of(case) and row.dtype in ours:
            row.times = row.median / ours[row.dtype]
    return rows


def as_json(row: Row) -> dict[str, Any]:
    """A row's fields, with the tokens a second of its median turn."""
    return {**asdict(row), "tokens_per_second": row.tokens / row.median}
