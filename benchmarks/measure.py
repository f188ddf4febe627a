"""How a case is measured: outputs are compared, turns timed, the machine's rate measured."""

import functools
import re
import resource
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer
from torch.utils.flop_counter import FlopCounterMode

DTYPES = FP32, BF16, AUTOCAST = ("fp32", "bf16", "bf16-autocast")
PUBLISHED = "published code"
TRAINING, EVALUATION = "training", "evaluation"
# A product this large keeps every unit busy; a GPU needs a larger one.
PRODUCT_WIDTH = {"cpu": 2048, "cuda": 8192}
RATE_REPEATS = 12


class Setting(NamedTuple):
    """Where and in which of :data:`DTYPES` a model computes."""

    device: torch.device
    dtype: str

    def prepare(self, module: nn.Module) -> nn.Module:
        """Return the module on the device, with weights of the dtype."""
        return module.to(self.device, torch.bfloat16 if self.dtype == BF16 else None)

    @contextmanager
    def precision(self, training: bool = True):
        """Compute in the dtype within the block, in training with gradients."""
        enabled = self.dtype == AUTOCAST
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)
        with torch.set_grad_enabled(training), autocast:
            yield


class Work(NamedTuple):
    """What a model does: a turn, which is timed, and outputs (N, …), which are compared."""

    turn: Callable[[], object]
    outputs: Callable[[], Tensor]


class Model(NamedTuple):
    """A model of a case.

    Args:
        build: makes it and its inputs, which are always the same ones.
        same: whether it must compute what ours does.
        dtypes: those that it runs in.
    """

    build: Callable[[Setting], Work]
    same: bool = False
    dtypes: tuple[str, ...] = DTYPES


@dataclass
class Case:
    """Models that do the same work side by side: a row of the table of cases.

    Args:
        paper: the room, or "kernels".
        name: of the case.
        mode: TRAINING or EVALUATION.
        tokens: that a turn reads.
        models: by name; the first is this package's.
        title: what a plot calls our model; "" keeps the case from plots.
        tolerance: largest difference of outputs in fp32.
        agreeing: the part of the outputs that must be within it.
    """

    paper: str
    name: str
    mode: str
    tokens: int
    models: Mapping[str, Model]
    title: str = ""
    tolerance: float = 2e-4
    agreeing: float = 1.0

    @property
    def ours(self) -> str:
        """Name of our model."""
        return next(iter(self.models))

    def build(self, model: str, setting: Setting) -> Work:
        """Return what one of the models does, which begins with the same random numbers as all."""
        torch.manual_seed(1)
        return self.models[model].build(setting)

    def __str__(self) -> str:
        return f"{self.paper}: {self.name}, {self.mode}"


@dataclass
class Row:
    """What was measured of a model in a dtype.

    Args:
        peak_bytes: the most that it holds, with its weights, in a separate process.
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

    def as_json(self) -> dict[str, Any]:
        """All fields, and the tokens a second of the median turn."""
        return {**asdict(self), "tokens_per_second": self.tokens / self.median}


def largest_differences(case: Case, device: torch.device) -> dict[str, float]:
    """How much each model that must compute what ours does differs from it, in fp32.

    Raises ValueError when that is more than the case's tolerance.
    """
    setting, found = Setting(device, FP32), {}
    others = [name for name, model in case.models.items() if model.same]
    if others:
        ours = case.build(case.ours, setting).outputs().flatten(1)
    for name in others:
        difference = ours - case.build(name, setting).outputs().flatten(1)
        of_rows = difference.abs().amax(1).sort().values
        found[name] = of_rows[int(case.agreeing * (len(of_rows) - 1))].item()
        # not a number is not within it either
        if not found[name] <= case.tolerance:
            remedy = "; give an unchanged checkout" if name.startswith(PUBLISHED) else ""
            raise ValueError(
                f"{case}: {name} differs from {case.ours} by {found[name]:.2g} with the same "
                f"weights, and {case.tolerance} is allowed: models that compute different things "
                f"are not compared{remedy}"
            )
    return found


def measure(
    case: Case,
    dtypes: Sequence[str],
    device: torch.device,
    turns: int,
    memory_of: Callable[[Case, str, str], int],
) -> list[Row]:
    """Time the models of a case, which take turns, A B C A B C, after one that warms up."""
    rows = [
        Row(
            case.paper, case.name, case.mode, name, dtype, case.tokens, memory_of(case, name, dtype)
        )
        for dtype in dtypes
        for name, model in case.models.items()
        if dtype in model.dtypes
    ]
    works = [case.build(row.model, Setting(device, row.dtype)) for row in rows]
    for row, work in zip(rows, works, strict=True):
        with FlopCounterMode(display=False) as counter:
            work.turn()
        row.multiply_adds = counter.get_total_flops() // 2
    for _ in range(turns):
        for row, work in zip(rows, works, strict=True):
            row.seconds.append(seconds_of(work.turn))
    ours = {row.dtype: row.median for row in rows if row.model == case.ours}
    for row in rows:
        row.of_rate = row.multiply_adds / multiply_add_rate(row.dtype, device) / row.median
        if row.model != case.ours:
            row.times = row.median / ours[row.dtype]
    return rows


def seconds_of(work: Callable[[], object]) -> float:
    """How long work takes, with what it asks of a GPU.

    The Timer of torch.utils.benchmark calls work twice before it takes a time; its clock does not.
    """
    return timeit.Timer(work, timer=timer).timeit(1)


@functools.cache
def multiply_add_rate(dtype: str, device: torch.device) -> float:
    """Multiply-adds a second in products of large square matrices, the best of some."""
    width = PRODUCT_WIDTH[device.type]
    of = torch.float32 if dtype == FP32 else torch.bfloat16
    left, right = (torch.randn(width, width, device=device).to(of) for _ in range(2))
    out = left @ right
    return width**3 / min(
        seconds_of(lambda: torch.mm(left, right, out=out)) for _ in range(RATE_REPEATS)
    )


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held: of the GPU's memory, or of the machine's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # both in KiB; getrusage's counts what the process was started from as well, if that was larger
    peak = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
