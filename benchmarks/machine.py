"""The machine that a benchmark runs on: its device, its rate of arithmetic, time and memory."""

import re
import resource
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.benchmark import timer

# A product this large keeps every unit busy; a GPU needs a larger one.
PRODUCT_WIDTH = {"cpu": 2048, "cuda": 8192}
RATE_REPEATS = 12
# Other programs' share of one core, in the last minute, above which figures are not to be trusted.
IDLE_LOAD = 0.5


def parse_device(text: str) -> torch.device:
    """The device of --device; raises ValueError when it is not there."""
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {text!r}: give cpu, cuda, or a GPU by number, as cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"--device is {text!r} and PyTorch sees {torch.cuda.device_count()} GPUs: give one of "
            "those, or cpu"
        )
    return device


def load_warning(load: float) -> str:
    """A line that says that the machine is not idle at this load average; "" if it is."""
    if load <= IDLE_LOAD:
        return ""
    return (
        f"warning: the load average of the last minute is {load:.1f}, other programs are running: "
        "figures for publication need an idle machine, so end those and wait a minute"
    )


def seconds_of(work: Callable[[], object]) -> float:
    """How long work takes, with what it asks of a GPU.

    The Timer of torch.utils.benchmark calls work twice before it takes a time; its clock does not.
    """
    return timeit.Timer(work, timer=timer).timeit(1)


def multiply_add_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Multiply-adds a second in products of large square matrices, the best of some."""
    width = PRODUCT_WIDTH[device.type]
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
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
