"""Speed and memory of this package's models beside code that people would take instead.

    python -m benchmarks [PAPER ...] [--quick] [--device cuda] [--dtype NAME ...]
                         [--original PATH ...] [--output FOLDER]

Beside ours stand fairseq's own models of the same size, plain code that does the same, the
published code in the checkouts of --original, and, where they are installed, x-transformers (with
its recurrence) and lucidrains' product-key-memory. What must compute the same as ours is given the
same weights, and compared first. Then the models take turns, A B C A B C. A training step is
forward, loss and backward (of memories and translation with the update), without dropout but in
translation; memories are full from the start. benchmarks/cases.py has the table of cases.

Tokens a second are those of the median turn. "% of rate": the time that a model's matrix products
would take at the measured rate of a large one, as a part of its time. "ours": how many times as
fast our model is in the same dtype. Peak memory is measured in a separate process, with the
weights, without the libraries. FOLDER gets benchmark.json after every case, and benchmark.png.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

import fairseq_plugins  # noqa: F401 (registers what is compared)
from benchmarks.cases import PAPERS, Selection
from benchmarks.machine import load_warning, parse_device
from benchmarks.measure import (
    DTYPES,
    FP32,
    Machine,
    Row,
    as_json,
    largest_difference,
    measure,
)
from benchmarks.plot import draw, summarise
from benchmarks.published import CHECKOUTS, import_published
from scripts._shared.command_line import check_at_least, exit_status, make_output_folder
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line
from scripts._shared.results import check_plotting, markdown_table, save_plot

HEADERS = ("model", "dtype", "tokens/s (lowest to highest)", "% of rate", "peak MiB", "ours")


def table(rows: list[Row]) -> str:
    """The rows of a case in Markdown."""
    cells = []
    for row in rows:
        rates = (row.tokens / seconds for seconds in (row.median, max(row.seconds)))
        median, lowest = (f"{rate:,.0f}" for rate in rates)
        highest, times = f"{row.tokens / min(row.seconds):,.0f}", row.times
        cells.append(
            [
                row.model,
                row.dtype,
                f"{median} ({lowest} to {highest})",
                f"{row.of_rate:.0%}",
                f"{row.peak_bytes / 2**20:,.0f}",
                f"{times:.2f} times" if times else "",
            ]
        )
    return markdown_table(HEADERS, cells)


def run(options: argparse.Namespace) -> None:
    """Measure the cases, and print and write each as soon as it is there."""
    check_at_least(1, turns=options.turns, threads=options.threads)
    device = parse_device(options.device)
    torch.set_num_threads(options.threads)
    published = import_published(options.original)
    if options.output:
        check_plotting()
        make_output_folder(options.output)
    print(hardware_line(device))
    if warning := load_warning(os.getloadavg()[0]):
        print(warning)
    asked = options.papers, options.quick, device, options.threads, options.original
    selection = Selection(*asked)
    cases, machine = selection.cases(), Machine(device)
    rows, differences, left_out = [], {}, {}
    for case in cases:
        print(f"\n{case}\n", flush=True)
        try:
            found = largest_difference(case, published, device)
            measured = measure(
                case, options.dtype, published, machine, options.turns, selection.own_memory
            )
        except torch.OutOfMemoryError as error:
            left_out[str(case)] = str(error)
            print(f"left out: {error}")
            continue
        rows += measured
        differences[str(case)] = found
        for model, difference in found.items():
            print(f"{model} differs by {difference:.1g} at most (fp32)")
        print(f"\n{table(measured)}", flush=True)
        if options.output:
            content = {
                "hardware": hardware_line(device),
                "multiply_adds_per_second": machine.rates,
                "largest_difference_fp32": differences,
                "left_out": left_out,
                "summary": summarise(cases, rows),
                "rows": [as_json(row) for row in rows],
            }
            write_json(options.output / "benchmark.json", content)
    if options.output and (summary := summarise(cases, rows)):
        save_plot(options.output / "benchmark.png", lambda axes: draw(axes, summary))


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("papers", nargs="*", metavar="PAPER", help=f"of {', '.join(PAPERS)} (all)")
    add("--quick", action="store_true", help="small cases, which show that all is there")
    add("--device", default="cpu", help="cpu or cuda (cpu)")
    add("--dtype", nargs="+", choices=DTYPES, default=[FP32], help="one or more (fp32)")
    urls = ", ".join(checkout.url for checkout in CHECKOUTS.values())
    add("--original", nargs="+", type=Path, default=[], help=f"checkouts of {urls}")
    add("--turns", type=int, default=7, help="that are timed (7)")
    add("--threads", type=int, default=torch.get_num_threads(), help="of the CPU (all cores)")
    add("--output", type=Path, help="folder for benchmark.json and benchmark.png")
    options = parser.parse_args(arguments)
    unknown = [paper for paper in options.papers if paper not in PAPERS]
    if unknown:
        parser.error(f"PAPER is {unknown[0]!r}: give some of {', '.join(PAPERS)}")
    return exit_status(lambda: run(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
