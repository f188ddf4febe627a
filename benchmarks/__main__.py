"""Compare speed and memory of this package's models with code that people would use instead.

    python -m benchmarks [PAPER ...] [--quick | --first] [--device cuda] [--dtype NAME ...]
                         [--original PATH ...] [--output FOLDER]

The models are compared with fairseq's own models of the same size, with plain implementations, with
the published code in the checkouts of --original, and with x-transformers and its recurrence, if it
is installed. Models that must compute the same as ours get the same weights, and their outputs are
compared first. Then the models take turns, A B C A B C. A training step is forward, loss and
backward; for memories and translation it includes the update. Only translation has dropout. Pasts
are full from the start. The table of cases is in benchmarks/cases.py.

Tokens per second are of the median turn. "% of rate" is the share of a model's time that its matrix
products would take at the measured rate of a large product. "ours" is how many times as fast our
model is in the same dtype. Peak memory is measured in a separate process, with the weights, without
the libraries. "waits" is how often the host waits for a GPU in a turn. FOLDER gets benchmark.json
after every case, and benchmark.png.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from benchmarks.cases import PAPERS, Selection
from benchmarks.measure import (
    DTYPES,
    FP32,
    Row,
    largest_differences,
    measure,
    multiply_add_rate,
)
from benchmarks.plot import draw, summarise
from benchmarks.published import URLS
from scripts._shared.command_line import check_at_least, exit_status
from scripts._shared.files import write_json
from scripts._shared.machine import hardware_line
from scripts._shared.results import markdown_table, prepare_results, save_plot

HEADERS = (
    "model",
    "dtype",
    "tokens/s (lowest to highest)",
    "% of rate",
    "peak MiB",
    "waits",
    "ours",
)
# Load average of the last minute, due to other programs, above which results are unreliable.
IDLE_LOAD = 0.5


def table(rows: list[Row]) -> str:
    """Return the rows of a case as a Markdown table."""
    cells = []
    for row in rows:
        median, lowest, highest = (
            f"{row.tokens / seconds:,.0f}"
            for seconds in (row.median, max(row.seconds), min(row.seconds))
        )
        rates, peak = f"{median} ({lowest} to {highest})", f"{row.peak_bytes / 2**20:,.0f}"
        times = f"{row.times:.2f} times" if row.times else ""
        waits = "" if row.host_waits is None else str(row.host_waits)
        cells.append([row.model, row.dtype, rates, f"{row.rate_share:.0%}", peak, waits, times])
    return markdown_table(HEADERS, cells)


def run(options: argparse.Namespace) -> None:
    """Measure the cases; print and write each as soon as it is measured."""
    check_at_least(1, turns=options.turns, threads=options.threads)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device is cuda, and PyTorch sees no GPU: give cpu")
    torch.set_num_threads(options.threads)
    asked = options.papers, options.quick, device, options.threads, options.original
    selection = Selection(*asked, options.first)
    cases = selection.cases()
    if options.output:
        prepare_results(options.output)
    print(hardware_line(device))
    if (load := os.getloadavg()[0]) > IDLE_LOAD:
        print(
            f"warning: the load average of the last minute is {load:.1f}: other programs are "
            "running; for figures to be published, end them and wait a minute"
        )
    rows, differences, left_out = [], {}, {}
    for name, case in cases.items():
        print(f"\n{name}\n", flush=True)
        try:
            differences[name] = largest_differences(case, device)
            measured = measure(case, options.dtype, device, options.turns, selection.measure_memory)
        except torch.OutOfMemoryError as error:
            left_out[name] = str(error)
            print(f"left out: {error}")
        else:
            rows += measured
            for model, difference in differences[name].items():
                print(f"{model} differs by {difference:.1g} at most (fp32)")
            print(f"\n{table(measured)}", flush=True)
        if options.output:
            content = {
                "hardware": hardware_line(device),
                "multiply_adds_per_second": {
                    dtype: multiply_add_rate(dtype, device) for dtype in options.dtype
                },
                "largest_difference_fp32": differences,
                "left_out": left_out,
                "summary": summarise(cases.values(), rows),
                "rows": [row.as_json() for row in rows],
            }
            write_json(options.output / "benchmark.json", content)
    if options.output and (summary := summarise(cases.values(), rows)):
        save_plot(options.output / "benchmark.png", lambda axes: draw(axes, summary))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("papers", nargs="*", metavar="PAPER", help=f"some of {', '.join(PAPERS)} (all)")
    add("--quick", action="store_true", help="small cases that only show that every model runs")
    add("--first", action="store_true", help="the cases for the first minutes on a GPU")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    add("--dtype", nargs="+", choices=DTYPES, default=[FP32], help="one or more (fp32)")
    add("--original", nargs="+", type=Path, default=[], help=f"checkouts of {URLS}")
    add("--turns", type=int, default=7, help="number of timed turns (7)")
    add(
        "--threads",
        type=int,
        default=torch.get_num_threads(),
        help="threads of the CPU (all cores)",
    )
    add("--output", type=Path, help="folder for benchmark.json and benchmark.png")
    options = parser.parse_args(arguments)
    unknown = [paper for paper in options.papers if paper not in PAPERS]
    if unknown:
        parser.error(f"PAPER is {unknown[0]!r}: give some of {', '.join(PAPERS)}")
    return exit_status(lambda: run(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
