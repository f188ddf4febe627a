"""The machine that figures are measured on."""

import datetime
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_BF16_UNITS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512", "bf16": "Arm"}


def _processor() -> dict[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    path = Path("/proc/cpuinfo")
    first = path.read_text(encoding="utf-8").split("\n\n")[0] if path.exists() else ""
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def bf16_units() -> str:
    """The CPU's units for bf16 arithmetic, empty where it has none."""
    processor = _processor()
    flags = processor.get("flags", processor.get("Features", "")).split()
    return " and ".join(name for flag, name in _BF16_UNITS.items() if flag in flags)


def hardware_line(device: "torch.device") -> str:
    """What a reader needs to know of the machine, in one line."""
    import torch

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


def synchronize(device: "torch.device") -> None:
    """Wait until the device has done all that was asked of it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
