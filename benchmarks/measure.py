"""Measure a case: compare outputs, time turns, and measure the machine's rate."""

import functools
import math
import re
import resource
import statistics
import timeit
import warnings
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
MODES = TRAINING, EVALUATION = ("training", "evaluation")
# A product this large keeps every unit busy; a GPU needs a larger one.
PRODUCT_WIDTH = {"cpu": 2048, "cuda": 8192}
RATE_REPEATS = 12


class Setting(NamedTuple):
    """The device and the dtype, one of :data:`DTYPES`, of a model."""

    device: torch.device
    dtype: str

    def prepare(self, module: nn.Module) -> nn.Module:
        """Return the module on the device, with weights of the dtype."""
        return module.to(self.device, torch.bfloat16 if self.dtype == BF16 else None)

    @contextmanager
    def precision(self, training: bool = True):
        """Compute in the dtype within the block, with gradients in training."""
        enabled = self.dtype == AUTOCAST
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)
        with torch.set_grad_enabled(training), autocast:
            yield


class Work(NamedTuple):
    """The work of a model: a turn, which is timed, and outputs (N, …), which are compared."""

    turn: Callable[[], object]
    outputs: Callable[[], Tensor]


class Model(NamedTuple):
    """A model of a case.

    Args:
        build: function that makes the model and its inputs, which are always the same.
        same: whether the model must compute the same as ours.
        dtypes: dtypes in which the model runs.
    """

    build: Callable[[Setting], Work]
    same: bool = False
    dtypes: tuple[str, ...] = DTYPES


@dataclass
class Case:
    """Models that do the same work side by side: a row of the table of cases.

    Args:
        paper: name of the paper's package, or "kernels".
        name: name of the case.
        mode: TRAINING or EVALUATION.
        tokens: number of tokens that a turn reads.
        models: the models by name; the first is this package's.
        title: our model's name in plots; "" keeps the case out of plots.
        tolerance: largest allowed difference of outputs in fp32.
        min_agreement: share of the outputs that must be within the tolerance.
    """

    paper: str
    name: str
    mode: str
    tokens: int
    models: Mapping[str, Model]
    title: str = ""
    tolerance: float = 2e-4
    min_agreement: float = 1.0

    @property
    def ours(self) -> str:
        """Name of our model."""
        return next(iter(self.models))

    def build(self, model: str, setting: Setting) -> Work:
        """Build one of the models and return its work; all start from the same random seed."""
        torch.manual_seed(1)
        return self.models[model].build(setting)

    def __str__(self) -> str:
        return f"{self.paper}: {self.name}, {self.mode}"


@dataclass
class Row:
    """The measurements of a model in a dtype.

    Args:
        peak_bytes: peak memory, weights included, in a separate process.
        multiply_adds: number in a turn's matrix products, as torch.utils.flop_counter counts them.
        rate_share: their time at the rate of a large matrix product, as a share of the turn's time.
        host_waits: how often a turn makes the host wait for a GPU; None on a CPU.
        seconds: seconds of each turn.
        times: how many times as fast ours is: this row's median over our median.
    """

    paper: str
    case: str
    mode: str
    model: str
    dtype: str
    tokens: int
    peak_bytes: int = 0
    multiply_adds: int = 0
    rate_share: float = 0.0
    host_waits: int | None = None
    seconds: list[float] = field(default_factory=list)
    times: float | None = None

    @property
    def median(self) -> float:
        """Seconds of the median turn."""
        return statistics.median(self.seconds)

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and the tokens per second of the median turn."""
        return {**asdict(self), "tokens_per_second": self.tokens / self.median}


def largest_differences(case: Case, device: torch.device) -> dict[str, float]:
    """Return how much each model that must compute the same as ours differs from it, in fp32.

    Raises ValueError if a difference exceeds the case's tolerance or is not finite.
    """
    setting, differences = Setting(device, FP32), {}
    others = [name for name, model in case.models.items() if model.same]
    if others:
        ours = case.build(case.ours, setting).outputs().flatten(1)
    for name in others:
        difference = ours - case.build(name, setting).outputs().flatten(1)
        by_row = difference.abs().amax(1).sort().values
        worst = by_row[-1].item()  # sorting puts NaN last
        within = by_row[int(case.min_agreement * (len(by_row) - 1))].item()
        differences[name] = within if math.isfinite(worst) else worst
        if not differences[name] <= case.tolerance:
            remedy = "; give an unchanged checkout" if name.startswith(PUBLISHED) else ""
            raise ValueError(
                f"{case}: {name} differs from {case.ours} by {differences[name]:.2g} with the same "
                f"weights, and {case.tolerance} is allowed: models that compute different things "
                f"are not compared{remedy}"
            )
    return differences


def measure(
    case: Case,
    dtypes: Sequence[str],
    device: torch.device,
    turns: int,
    measure_memory: Callable[[Case, str, str], int],
) -> list[Row]:
    """Time the models of a case, which take turns, A B C A B C, after a warm-up turn of each."""
    case_names = case.paper, case.name, case.mode
    rows = [
        Row(*case_names, name, dtype, case.tokens, measure_memory(case, name, dtype))
        for dtype in dtypes
        for name, model in case.models.items()
        if dtype in model.dtypes
    ]
    works = [case.build(row.model, Setting(device, row.dtype)) for row in rows]
    for row, work in zip(rows, works, strict=True):
        with FlopCounterMode(display=False) as counter:
            work.turn()
        row.multiply_adds = counter.get_total_flops() // 2
        if device.type == "cuda":
            row.host_waits = count_waits(work.turn)
    for _ in range(turns):
        for row, work in zip(rows, works, strict=True):
            row.seconds.append(time_turn(work.turn))
    ours = {row.dtype: row.median for row in rows if row.model == case.ours}
    for row in rows:
        row.rate_share = row.multiply_adds / multiply_add_rate(row.dtype, device) / row.median
        if row.model != case.ours:
            row.times = row.median / ours[row.dtype]
    return rows


def time_turn(work: Callable[[], object]) -> float:
    """Return the seconds that work takes, including its work on a GPU.

    This uses the clock of torch.utils.benchmark, not its Timer, which runs work twice beforehand.
    """
    return timeit.Timer(work, timer=timer).timeit(1)


def count_waits(work: Callable[[], object]) -> int:
    """Return how often work makes the host wait for the GPU, as CUDA's warnings count it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing" in str(warning.message) for warning in caught)


@functools.cache
def multiply_add_rate(dtype: str, device: torch.device) -> float:
    """Return the multiply-adds per second in products of large square matrices, best of several."""
    width = PRODUCT_WIDTH[device.type]
    torch_dtype = torch.float32 if dtype == FP32 else torch.bfloat16
    left, right = (torch.randn(width, width, device=device).to(torch_dtype) for _ in range(2))
    out = left @ right
    return width**3 / min(
        time_turn(lambda: torch.mm(left, right, out=out)) for _ in range(RATE_REPEATS)
    )


def peak_memory(device: torch.device) -> int:
    """Return the bytes that this process has held at most: on the GPU, or in the machine's RAM."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # both in KiB; getrusage's value includes the peak of the process that started this one
    peak = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
