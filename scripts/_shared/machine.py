"""The machine that a benchmark runs on: what it is, whether it is idle, its rates, its memory."""

import datetime
import os
import platform
import re
import resource
import timeit
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.utils.benchmark import timer

# A product this large keeps every unit busy; a GPU needs a larger one.
PRODUCT_WIDTH = 2048
PRODUCT_WIDTH_ON_GPU = 8192
# Far more than any cache holds.
COPIED_BYTES = 1 << 28
RATE_REPEATS = 12
# Other programs' share of one core, in the last minute, above which figures are not to be trusted.
IDLE_LOAD = 0.5
_BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "bf16": "Arm"}


def parse_device(text: str) -> torch.device:
    """The device of --device.

    Raises ValueError when this machine or this PyTorch has none such.
    """
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


def _processor() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def bf16_units() -> str:
    """The CPU's units for bf16 arithmetic, empty where it has none."""
    processor = _processor()
    flags = processor.get("flags", processor.get("Features", "")).split()
    return " and ".join(name for flag, name in _BF16_UNITS.items() if flag in flags)


def hardware_line(device: torch.device) -> str:
    """What a reader needs to know of the machine, in one line."""
    processor, units = _processor(), bf16_units()
    parts = [
        processor.get("model name", platform.processor() or platform.machine()),
        f"{os.cpu_count()} cores",
        f"{torch.get_num_threads()} threads",
        f"bf16 units: {units or 'none'}",
        f"PyTorch {torch.__version__}",
        datetime.date.today().isoformat(),
    ]
    if device.type == "cuda":
        parts.insert(0, torch.cuda.get_device_name(device))
    return ", ".join(parts)


def load_warning(load: float) -> str | None:
    """A line that says that the machine is not idle at this load average; None if it is."""
    if load <= IDLE_LOAD:
        return None
    return (
        f"warning: the load average of the last minute is {load:.1f}, other programs are running: "
        "figures for publication need an idle machine, so end those and wait a minute"
    )


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object]) -> float:
    """How long work takes, with what it asks of a GPU.

    The Timer of torch.utils.benchmark does not fit: it calls work twice before it takes a time.
    """
    return timeit.Timer(work, timer=timer).timeit(1)


def multiply_add_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Multiply-adds a second in products of large square matrices, the best of some."""
    width = PRODUCT_WIDTH if device.type == "cpu" else PRODUCT_WIDTH_ON_GPU
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    out = left @ right
    return width**3 / min(
        seconds_of(lambda: torch.mm(left, right, out=out)) for _ in range(RATE_REPEATS)
    )


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes together, the best of some."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = min(seconds_of(lambda: target.copy_(source)) for _ in range(RATE_REPEATS))
    return 2 * COPIED_BYTES / seconds


def free_memory(device: torch.device) -> int:
    """Bytes that are free: of the GPU's memory, or of the machine's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)[1])


def reset_peak_memory(device: torch.device) -> None:
    """Let :func:`peak_memory` count from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # not there in every sandbox: the peak is then that of the whole process
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held: of the GPU's memory, or of the machine's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # both in KiB; getrusage's counts what the process was started from as well, if that was larger
    peak = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * (int(peak[1]) if peak else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
