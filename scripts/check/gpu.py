"""Train, resume, evaluate and generate with all four models on a GPU, beside the CPU.

    python -m scripts.check.gpu [--device cuda|cpu] [--minutes 9] [--output DIR]
        [--only WORD …] [--original PATH …]

Each row of the report is computed in a process of its own, the most important ones first. A row
that fails says why, and the next one goes on. The command ends by itself in time: rows that it does
not reach are listed as such. Its data is made on the spot. Ctrl-C ends it, with a report.

OUTPUT/gpu.json               all figures, written after each row
OUTPUT/gpu.md, gpu.png        the same as tables and a plot, at the end
OUTPUT/gpu.log                what fairseq printed
"""

import argparse
import contextlib
import functools
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from scripts._shared.command_line import check_at_least, command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import write_json, write_text
from scripts._shared.machine import hardware_line, parse_device
from scripts._shared.results import prepare_results, save_plot
from scripts.check._gpu_kernels import (
    COMPILED,
    KERNELS,
    beside_published,
    compare_kernels,
    find_published,
)
from scripts.check._gpu_models import (
    AMP,
    BF16,
    FP16,
    FP32,
    MODELS,
    PLAIN,
    REAL,
    TINY,
    write_data,
)
from scripts.check._gpu_report import FAILED, NOT_REACHED, OK, WRONG, draw, judge, summary, texts
from scripts.check._gpu_training import Found, Place, everything, reference, speed

# Seconds that are kept for the report, that a row is expected to take before any other of its size
# has been seen, and that its process may take to end after its last step.
FOR_REPORT, EXPECTED, TO_END = 10, 10, 10
# What the processes of rows are forked with: imports take longer than most of the rows.
IMPORTED = ["scripts.check._gpu_kernels", "torch._dynamo", "fairseq_cli.train"]
IMPORTED += [f"fairseq_cli.{name}" for name in ("eval_lm", "validate", "generate", "interactive")]


@dataclass(frozen=True)
class Row:
    """What is computed in one process.

    Args:
        name: what tables call it.
        steps: makes the row's steps at a place.
        precision: of PRECISIONS.
        size: of the model; None without a model.
        finds: what its losses on the CPU are for, a model and a size.
        needs: of what it needs such losses.
    """

    name: str
    steps: Callable[[Place], list[Callable[[], Found]]]
    precision: str = FP32
    size: str | None = None
    finds: str | None = None
    needs: str | None = None


def rows_of(device: str, originals: list[tuple[str, Path]]) -> list[Row]:
    """All rows, the most important first."""

    def on_cpu(size: str) -> list[Row]:
        return [
            Row(
                f"{model.name} {size} on the CPU",
                functools.partial(reference, model, size),
                size=size,
                finds=f"{model.name} {size}",
            )
            for model in MODELS
        ]

    def models(size: str, *precisions: str) -> list[Row]:
        return [
            Row(
                f"{model.name} {size} {precision}",
                functools.partial(everything, model, size, precision),
                precision,
                size,
                needs=f"{model.name} {size}",
            )
            for precision in precisions
            # fairseq's --amp needs a GPU
            if device == "cuda" or precision != AMP
            for model in MODELS
        ]

    def plain(*precisions: str) -> list[Row]:
        return [
            Row(
                f"{model.name} as large as {name} {precision}",
                functools.partial(speed, model, REAL, precision),
                precision,
                REAL,
            )
            for precision in precisions
            for name, model in PLAIN.items()
        ]

    def attention(
        name: str, kernels: dict[str, Callable[..., tuple]], *precisions: str
    ) -> list[Row]:
        return [
            Row(
                f"{name} {precision}",
                functools.partial(compare_kernels, kernels, precision),
                precision,
            )
            for precision in precisions
        ]

    return [
        *on_cpu(TINY),
        *models(TINY, FP32, BF16, FP16, AMP),
        *attention("attention", KERNELS, FP32, BF16, FP16),
        *on_cpu(REAL),
        *models(REAL, BF16, FP32),
        *plain(BF16, FP32),
        *(
            Row(f"{name} beside published code", functools.partial(beside_published, name, path))
            for name, path in originals
        ),
        *attention("compiled attention", COMPILED, BF16, FP32),
        *models(REAL, FP16, AMP),
    ]


def compute(row: Row, place: Place, log: Path, told: Connection) -> None:
    """Take the steps of a row, in a process of its own, and tell what each has found."""
    with log.open("a", encoding="utf-8") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    print(f"\n===== {row.name}", flush=True)
    # what it was forked with is no garbage, and takes long to look through
    gc.freeze()
    for number, step in enumerate(row.steps(place)):
        try:
            told.send(step())
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            name = getattr(step, "func", step).__name__
            told.send({"why": f"{name}: {type(error).__name__}: {lines[-1]}"})
            # nothing goes on from a training that failed
            if number == 0 and row.size is not None:
                break
    # else the end of a step that ends the process would look like that of the row
    told.send({"done": True})


class Check:
    """The rows of a command line, and what has been found.

    Args:
        options: of the command line.
        device: of ``options``.
        originals: names and folders of published code.
    """

    def __init__(
        self, options: argparse.Namespace, device: torch.device, originals: list[tuple[str, Path]]
    ) -> None:
        self.device = device
        self.context = multiprocessing.get_context("forkserver")
        self.output = options.output.resolve()
        rows = rows_of(device.type, originals)
        chosen = [row for row in rows if set(options.only) <= set(row.name.split())]
        if not chosen:
            raise ValueError(
                f"--only is {' '.join(options.only)!r}: no row's name has all of these words, give "
                f"fewer, such as those of {rows[-1].name!r}"
            )
        needed = {row.needs for row in chosen} - {None}
        self.rows = [row for row in rows if row in chosen or row.finds in needed]
        self.started = time.monotonic()
        self.deadline = self.started + 60 * options.minutes - FOR_REPORT
        self.content: dict[str, Any] = {"device": device.type, "rows": []}
        # seconds of the last row of a size
        self.last: dict[str | None, float] = {}
        self.expected: dict[str, list[float]] = {}

    def run(self) -> None:
        """Compute the rows and write the report.

        Raises ValueError when rows failed or are wrong, or none came to its end.
        """
        prepare_results(self.output)
        self.context.set_forkserver_preload(IMPORTED)
        (self.output / "gpu.log").unlink(missing_ok=True)
        self.content["hardware"] = hardware_line(self.device)
        print(self.content["hardware"], flush=True)
        with tempfile.TemporaryDirectory(prefix="work", dir=self.output) as work:
            try:
                # the first process waits for the imports, which are no row's and cannot be stopped
                first = threading.Thread(target=lambda: self._start(gc.freeze).join(), daemon=True)
                first.start()
                write_data(Path(work) / "data", self.device)
                first.join(max(0.0, self.deadline - time.monotonic()))
                for number, row in enumerate(self.rows, 1):
                    self._compute(row, Path(work))
                    self._tell(f"{number:2}/{len(self.rows)}", self.content["rows"][-1])
            finally:
                self._report()
        counts = [row["state"] for row in self.content["rows"]]
        if set(counts) == {NOT_REACHED}:
            raise ValueError("no row came to its end in time: give more --minutes")
        bad = counts.count(FAILED) + counts.count(WRONG)
        if bad:
            raise ValueError(
                f"{bad} of {len(counts)} rows failed or are wrong: {short(self.output)}/gpu.md "
                "says why, gpu.log has fairseq's messages"
            )

    def _compute(self, row: Row, work: Path) -> None:
        """Compute a row and keep what it finds."""
        found: dict[str, Any] = {"name": row.name, "precision": row.precision, "size": row.size}
        found |= {"state": NOT_REACHED, "seconds": 0.0, "why": []}
        self.content["rows"].append(found)
        start = time.monotonic()
        if self.last.get(row.size, EXPECTED) <= self.deadline - start:
            with tempfile.TemporaryDirectory(dir=work) as folder:
                place = Place(self.device, work / "data", Path(folder), self.expected)
                ended = self._follow(row, place, found)
            self.last[row.size] = found["seconds"] = time.monotonic() - start
            wrong = judge(found)
            found["state"] = FAILED if found["why"] else WRONG if wrong else OK
            if found["state"] == OK and not ended:
                found["state"] = NOT_REACHED
            found["why"] += [*wrong, *([] if ended else ["stopped: the time was over"])]
            if row.finds and "losses" in found:
                self.expected[row.finds] = found["losses"]
        self.content["seconds"] = time.monotonic() - self.started
        write_json(self.output / "gpu.json", self.content)

    def _start(self, work: Callable[..., None], *arguments: Any) -> BaseProcess:
        process = self.context.Process(target=work, args=arguments)
        process.start()
        return process

    def _follow(self, row: Row, place: Place, found: dict[str, Any]) -> bool:
        """Have another process compute a row; return whether it came to its end in time."""
        listening, told = self.context.Pipe(duplex=False)
        process = self._start(compute, row, place, self.output / "gpu.log", told)
        # the child has the other end, and its end closes it
        told.close()
        done = False
        try:
            with contextlib.suppress(EOFError):
                while not done:
                    if not listening.poll(max(0.0, self.deadline - time.monotonic())):
                        return False
                    part = listening.recv()
                    done = part.pop("done", False)
                    found["why"] += [part.pop("why")] if "why" in part else []
                    found.update(part)
            process.join(TO_END)
            if process.exitcode is None:
                found["why"].append(f"the process did not end {TO_END} s after its last step")
            elif process.exitcode or not done:
                before = "" if done else " before its last step was done"
                found["why"].append(
                    f"the process ended with exit status {process.exitcode}{before}"
                )
            return True
        finally:
            process.kill()
            process.join()

    def _tell(self, number: str, row: dict[str, Any]) -> None:
        left = max(0.0, self.deadline - time.monotonic())
        told = "; ".join([row["state"], *row["why"]])
        seconds = f"{row['seconds']:.0f} s"
        print(f"{number} {row['name']}: {told} ({seconds}, {left:.0f} s left)", flush=True)

    def _report(self) -> None:
        """Write the tables and the plot of what there is."""
        self.content.setdefault("seconds", time.monotonic() - self.started)
        rows = self.content["rows"]
        write_text(self.output / "gpu.md", "\n\n".join(texts(self.content)) + "\n")
        save_plot(self.output / "gpu.png", lambda *axes: draw(*axes, rows), columns=2)
        print(f"{summary(self.content)}\nwritten to {short(self.output)}/gpu.json, .md and .png")


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"], help="what is checked (cuda)")
    add("--minutes", type=float, default=9, help="after which it ends by itself (9)")
    add("--only", nargs="+", default=[], metavar="WORD", help="rows whose names have all of these")
    checkouts = "checkouts of the published code to compare with"
    add("--original", nargs="+", type=Path, default=[], metavar="PATH", help=checkouts)
    add("--output", type=Path, default=Path("gpu_check"), help="folder (gpu_check)")
    options = parser.parse_args(arguments)
    # else asking for GPUs would keep processes that are forked later from using them
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

    def work() -> None:
        check_at_least(1, minutes=options.minutes)
        Check(options, parse_device(options.device), list(find_published(options.original))).run()

    left = "the report has what was found; the same command starts anew"
    return exit_status(work, left, options.output)


if __name__ == "__main__":
    sys.exit(main())
