"""fairseq's commands in this process, and what is seen of the updates that they make."""

import contextlib
import gc
import importlib
import io
import logging
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fairseq.trainer import Trainer
from torch import Tensor

import fairseq_plugins
from scripts._shared.machine import synchronize

# Updates that warm up, and the last ones, of which the waits of the host are counted: not timed.
WARM, COUNTED = 5, 4
PACKAGE = Path(fairseq_plugins.__file__).parent
# Functions of this package that may make the host wait in an update on one worker: the list of
# docs/gpu.md.
SPANS_READ = "fairseq_plugins/all_attention/adaptive_span.py read_head_groups"
WAITS = {
    SPANS_READ,
    "fairseq_plugins/product_key_memory/bf16_values.py places",
    "fairseq_plugins/product_key_memory/values.py read_numbers",
}


@dataclass
class Updates:
    """What was seen of a training's updates.

    Args:
        device: of the training.
        number: of its updates.

    Attributes:
        steps: how often fairseq took a step, those that made no update among them.
    """

    device: torch.device
    number: int
    sums: list[Tensor] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    waits: Counter = field(default_factory=Counter)
    steps: int = 0

    def losses(self) -> list[float]:
        """Mean loss of each update, in nats; raises ValueError where updates are missing."""
        if len(self.sums) != self.number:
            raise ValueError(f"{len(self.sums)} of {self.number} updates were made")
        return [float(total) / size for total, size in zip(self.sums, self.sizes, strict=True)]

    def speed(self) -> float:
        """Tokens a second of the median update that is timed."""
        timed = slice(WARM, len(self.seconds) - COUNTED)
        pairs = zip(self.tokens[timed], self.seconds[timed], strict=True)
        return statistics.median(tokens / seconds for tokens, seconds in pairs)

    def overflows(self) -> int:
        """Steps that fairseq left out because a gradient was not finite."""
        return self.steps - len(self.sums)


@contextlib.contextmanager
def watched(device: torch.device, number: int) -> Iterator[Updates]:
    """See the updates of a training that fairseq-train makes during the block."""
    updates = Updates(device, number)
    step, reduce = Trainer.train_step, Trainer._reduce_and_log_stats

    def timed_step(trainer: Trainer, samples: Any, raise_oom: bool = False) -> Any:
        counted = device.type == "cuda" and len(updates.sums) >= number - COUNTED
        synchronize(device)
        start = time.perf_counter()
        with counted_waits(updates.waits) if counted else contextlib.nullcontext():
            # else fairseq leaves out what does not fit, and says that it went well
            result = step(trainer, samples, raise_oom=True)
        synchronize(device)
        seconds = time.perf_counter() - start
        updates.steps += 1
        # not of a step that overflowed, nor once more of one that fairseq tried again within itself
        if len(updates.seconds) < len(updates.sums):
            updates.seconds.append(seconds)
        return result

    def noted(
        trainer: Trainer, outputs: list[dict], sample_size: float, grad_norm: Any = None
    ) -> Any:
        # validation has no gradient
        if grad_norm is not None:
            updates.sums.append(torch.as_tensor(sum(output["loss"] for output in outputs)))
            updates.sizes.append(sample_size)
            updates.tokens.append(sum(output["ntokens"] for output in outputs))
        return reduce(trainer, outputs, sample_size, grad_norm)

    with (
        mock.patch.object(Trainer, "train_step", timed_step),
        mock.patch.object(Trainer, "_reduce_and_log_stats", noted),
    ):
        yield updates


@contextlib.contextmanager
def counted_waits(waits: Counter) -> Iterator[None]:
    """Count where the host waits for the GPU during the block, by the line that asks."""
    here = str(Path(__file__))

    def note(message: Any, *_: Any) -> None:
        if "synchronizing" not in str(message):
            return
        frame = sys._getframe(1)
        # the line that called torch, which may be torch's own Python
        while frame.f_back and (
            {"torch", "warnings.py"} & set(Path(frame.f_code.co_filename).parts)
            or frame.f_code.co_filename == here
        ):
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        ours = PACKAGE in file.parents
        told = file.relative_to(PACKAGE.parent) if ours else Path(*file.parts[-2:])
        waits[f"{told}:{frame.f_lineno} {frame.f_code.co_name}"] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class _Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        self.lines.append(record.getMessage())


def command(name: str, *words: str | Path) -> str:
    """Be fairseq's command, such as ``eval_lm``; returns what it logged and printed."""
    module = importlib.import_module(f"fairseq_cli.{name}")
    logged, printed = _Lines(), io.StringIO()
    logging.root.addHandler(logged)
    try:
        with (
            mock.patch.object(sys, "argv", [name, *map(str, words)]),
            contextlib.redirect_stdout(printed),
        ):
            module.cli_main()
    finally:
        logging.root.removeHandler(logged)
        # fairseq's trainer and model hold each other
        gc.collect()
    return "\n".join([*logged.lines, printed.getvalue()])
