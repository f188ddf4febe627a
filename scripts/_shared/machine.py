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
    """Return the fields of the first processor in /proc/cpuinfo; empty without this file."""
    path = Path("/proc/cpuinfo")
    first = path.read_text(encoding="utf-8").split("\n\n")[0] if path.exists() else ""
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def bf16_units() -> str:
    """Return the names of the CPU's units for bf16 arithmetic; empty if it has none."""
    processor = _processor()
    flags = processor.get("flags", processor.get("Features", "")).split()
    return " and ".join(name for flag, name in _BF16_UNITS.items() if flag in flags)


def hardware_line(device: "torch.device") -> str:
    """Describe the machine in one line for readers of results."""
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
    """Wait until the device has finished all queued work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
