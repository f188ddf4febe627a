"""Speed and memory of product-key memories by slots, heads, k and tokens: a part of `make bench`.

    python -m scripts.benchmark.product_key_memory [--output FOLDER]

Beside a memory stand the times that its least arithmetic and its least copying would take at the
rates measured on this machine, the feed-forward sublayer that it replaces, and the same memory
written plainly with nn.EmbeddingBag: with a dense gradient and Adam, and with a sparse one and
SparseAdam. All read the same tokens, and they take turns: A B C A B C.
"""

import argparse
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from scripts._shared.command_line import command_parser
from scripts._shared.commands import ROOT, short
from scripts._shared.machine import (
    hardware_line,
    load_warning,
    multiply_add_rate,
    parse_device,
    synchronize,
)
from scripts.benchmark._baselines import BF16, DTYPES, FP32, Entry
from scripts.benchmark._comparison import parse_names, parse_number
from scripts.benchmark._product_key_memory_baselines import (
    BACKWARD,
    FIXED,
    FIXED_ROWS,
    FIXED_SEARCHED,
    FORWARD,
    INFERENCE,
    MODELS,
    QUERY_WIDTH,
    SEARCH,
    TRAINING_STEP,
    UPDATE,
    WIDTH,
    MemoryCase,
    SteppedLayer,
    build_layers,
    check_same_outputs,
    draw_fixed_slots,
    step_memory,
)
from scripts.benchmark._product_key_memory_costs import copy_rate, costs, free_memory, state_bytes
from scripts.benchmark._product_key_memory_report import MemoryMeasurement, MemoryReport
from scripts.benchmark._report import check_output

MODES = TRAIN, INFER, FIND, FIX = ("train", "inference", "search", "fixed-rows")
PARTS: dict[str, dict[str, Callable[[SteppedLayer], object]]] = {
    TRAIN: {
        FORWARD: SteppedLayer.forward,
        BACKWARD: SteppedLayer.backward,
        UPDATE: SteppedLayer.update,
    },
    INFER: {INFERENCE: SteppedLayer.infer},
    FIND: {SEARCH: SteppedLayer.search},
}
GIB = 2**30
# beside the dtypes of products: a rate in bytes
COPY = "copy"

EXPLANATION = """
Width {width}, queries of {query_width}. Setting: heads, slots that a head reads, and tokens, with
slashes between. Search: from the tokens to slots and scores, which is a part of forward; update:
the optimizer's step and clearing the gradients; a training step is forward, backward and update.
Fixed rows: a training step without search in which all reads are of {rows:,} rows at random places
of the table; searched: the same after a search of which the scores alone are taken. Milliseconds:
the median repeat of {steps}, the fastest and the slowest. Arithmetic: multiply-adds that must be
done, at the rate measured here ({rates} billion a second); copying: bytes that must move, every row
once, at the rate measured here ({copied:,.1f} billion a second). Times: how many times as fast
{ours} is, median over median of the same run. Peak memory: of a process of its own that trains,
with the weights, without the libraries. Largest tensor: that an operation of a training step
allocates, beside the table of values.
Machine: {hardware}."""


class MemoryBenchmark:
    """The comparison that the command line's options ask for.

    Raises ValueError for options that make none.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = parse_device(options.device)
        self.steps = parse_number("--steps", options.steps)
        self.threads = parse_number("--threads", options.threads)
        self.dtypes = parse_names("--dtype", options.dtype, DTYPES)
        self.modes = parse_names("--mode", options.mode, MODES)
        sizes = [
            dict.fromkeys(parse_number(f"--{name}", text) for text in getattr(options, name))
            for name in MemoryCase._fields
        ]
        self.cases = [MemoryCase(*numbers) for numbers in itertools.product(*sizes)]
        for case in self.cases:
            root = math.isqrt(case.slots)
            if root**2 != case.slots:
                raise ValueError(
                    f"--slots is {case.slots}: product keys need a square number, such as "
                    f"{root**2} or {(root + 1) ** 2}"
                )
            if case.knn > case.slots:
                raise ValueError(f"--knn is {case.knn}: give at most --slots, {case.slots}")
        torch.set_num_threads(self.threads)

    def admit(self, case: MemoryCase, dtype: str) -> tuple[list[Entry], list[str]]:
        """The entries for whose training there is memory, and why others are left out.

        Raises ValueError when ours is not among them.
        """
        free, needed = free_memory(self.device), case.table_bytes(dtype)
        admitted, reasons = [], []
        trained = {TRAIN, FIX} & set(self.modes)
        # in the order of the table; dense gradients take the most and come last
        for model in (MODELS.ours, MODELS.feed_forward, MODELS.sparse, MODELS.dense):
            more = state_bytes(case, model, dtype) if trained else 0
            if needed + more <= free:
                needed += more
                admitted.append(Entry(model, dtype))
                continue
            lack = f"{(needed + more) / GIB:.1f} GiB are needed, {free / GIB:.1f} GiB are free"
            if model == MODELS.ours:
                raise ValueError(f"--slots is {case.slots} ({dtype}): {lack}: give fewer slots")
            reasons.append(
                f"left out: {model} with {case.slots} slots, {case.text}, {dtype}: beside the "
                f"others {lack}"
            )
        return sorted(admitted, key=lambda entry: MODELS.index(entry.model)), reasons

    def memory_of(self, case: MemoryCase, entry: Entry) -> tuple[int, int]:
        """Bytes that a entry's training takes, and of its largest tensor, in another process.

        Raises ValueError when that process fails.
        """
        words = [sys.executable, "-m", __spec__.name, "--dtype", entry.dtype]
        for name, number in case._asdict().items():
            words += [f"--{name}", str(number)]
        words += ["--device", str(self.device), "--threads", str(self.threads)]
        words += ["--peak-of", entry.model]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        ended = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
        if ended.returncode:
            reason = ended.stderr.strip().splitlines()[-1:] or ["no message"]
            raise ValueError(
                f"the memory of {entry.model} {entry.dtype} ({case.slots} slots, "
                f"{case.text}) cannot be measured, exit status {ended.returncode}, {reason[0]}: "
                "where memory is short give smaller --slots"
            )
        peak, largest = ended.stdout.split()[-2:]
        return int(peak), int(largest)

    def timings(
        self, layers: list[SteppedLayer], parts: dict[str, Callable], bar: tqdm
    ) -> dict[str, list[list[float]]]:
        """Seconds of each part, of each layer in each repeat; the layers take turns."""
        seconds = {part: [[] for _ in layers] for part in parts}
        # the first round allocates the optimizers' state
        for repeat in range(1 + self.steps):
            bar.update()
            for number, layer in enumerate(layers):
                for part, work in parts.items():
                    synchronize(self.device)
                    started = time.perf_counter()
                    work(layer)
                    synchronize(self.device)
                    if repeat:
                        seconds[part][number].append(time.perf_counter() - started)
        return seconds

    def measure(
        self, case: MemoryCase, entries: list[Entry], rates: dict[str, float], bar: tqdm
    ) -> list[MemoryMeasurement]:
        """Time the entries, all of one dtype, in turn."""
        memory = {}
        for entry in entries if TRAIN in self.modes else ():
            memory[entry] = self.memory_of(case, entry)
            bar.update()
        layers = build_layers(case, entries, self.device)
        memories = [layer for layer in layers if layer.entry.model != MODELS.feed_forward]
        measured = []

        def record(
            part: str, layers: list[SteppedLayer], seconds: list[list[float]], rows: int
        ) -> None:
            for layer, of_layer in zip(layers, seconds, strict=True):
                model, dtype = layer.entry
                cost = costs(case, model, rows, dtype)[part]
                whole = part == TRAINING_STEP
                peak, largest = memory.get(layer.entry, (0, 0)) if whole else (0, 0)
                measured.append(
                    MemoryMeasurement(
                        str(case.slots),
                        part,
                        case.text,
                        model,
                        dtype,
                        tokens=case.tokens,
                        floor_seconds=cost.multiply_adds / rates[FP32 if dtype == FP32 else BF16],
                        peak_bytes=peak,
                        seconds=of_layer,
                        moved_bytes=cost.moved,
                        copy_seconds=cost.moved / rates[COPY],
                        largest_bytes=largest,
                        table_bytes=case.table_bytes(dtype),
                    )
                )

        rows = memories[0].search()[1].unique().numel()
        for mode, parts in PARTS.items():
            if mode not in self.modes:
                continue
            taking_part = memories if mode == FIND else layers
            seconds = self.timings(taking_part, parts, bar)
            if mode == TRAIN:
                seconds[TRAINING_STEP] = [
                    [sum(step) for step in zip(*of_parts, strict=True)]
                    for of_parts in zip(*seconds.values(), strict=True)
                ]
            for part, of_part in seconds.items():
                record(part, taking_part, of_part, rows)
        if FIX in self.modes:
            slots = draw_fixed_slots(case, torch.Generator().manual_seed(1)).to(self.device)
            for part in (FIXED, FIXED_SEARCHED):
                for layer in memories:
                    layer.fix_slots(slots, searched=part == FIXED_SEARCHED)
                of_part = self.timings(memories, {part: SteppedLayer.step}, bar)[part]
                record(part, memories, of_part, slots.unique().numel())
        return measured

    def rates(self) -> dict[str, float]:
        """Bytes copied a second, and multiply-adds a second in the dtypes that take part."""
        rates = {COPY: copy_rate(self.device)}
        if FP32 in self.dtypes:
            rates[FP32] = multiply_add_rate(torch.float32, self.device)
        if self.dtypes != [FP32]:
            rates[BF16] = multiply_add_rate(torch.bfloat16, self.device)
        return rates

    def run(self) -> tuple[list[MemoryMeasurement], dict]:
        """Measure everything; returns the measurements and what else belongs to them."""
        runs = {pair: self.admit(*pair) for pair in itertools.product(self.cases, self.dtypes)}
        left_out = [reason for _, reasons in runs.values() for reason in reasons]
        rounds = len(set(self.modes) - {FIX}) + 2 * (FIX in self.modes)
        steps = len(self.cases) + len(runs) * rounds * (1 + self.steps)
        steps += sum(len(admitted) for admitted, _ in runs.values()) if TRAIN in self.modes else 0
        differences, measurements = {}, []
        with tqdm(total=steps, desc="benchmark", unit="step", disable=None) as bar:
            # what cannot be compared is refused before anything else is done
            for case in self.cases:
                difference = check_same_outputs(case, self.device)
                differences[f"{case.slots} slots, {case.text}"] = difference
                bar.update()
            rates = self.rates()
            for (case, _), (admitted, _) in runs.items():
                measurements += self.measure(case, admitted, rates, bar)
        return measurements, {
            "hardware": hardware_line(self.device),
            "steps": self.steps,
            "copied_bytes_per_second": rates.pop(COPY),
            "multiply_adds_per_second": rates,
            "left_out": left_out,
            "largest_output_difference_fp32": differences,
        }

    def own_memory(self, model: str) -> tuple[int, int]:
        """Bytes that a entry's training adds to this process, and of its largest tensor."""
        return step_memory(self.cases[0], Entry(model, self.dtypes[0]), self.device)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    """Options of the command line, as they were given."""
    parser = command_parser(__doc__)
    for option, default, meaning in [
        ("--slots", "16384 65536 262144 1048576", "square numbers"),
        ("--heads", "4", "each reads slots of its own"),
        ("--knn", "32", "slots that a head reads"),
        ("--tokens", "2048", "that a step reads"),
    ]:
        parser.add_argument(
            option, nargs="+", default=default.split(), metavar="N", help=f"{meaning} ({default})"
        )
    for option, known, default in [("--mode", MODES, MODES), ("--dtype", DTYPES, (FP32,))]:
        parser.add_argument(
            option,
            nargs="+",
            metavar="NAME",
            default=list(default),
            help=f"of {', '.join(known)} ({'all' if default == known else default[0]})",
        )
    parser.add_argument("--steps", default="7", help="repeats that are timed (7)")
    parser.add_argument(
        "--threads", default=str(torch.get_num_threads()), help="of the CPU (all cores)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (cpu)")
    parser.add_argument("--output", type=Path, help="folder for benchmark.json and benchmark.png")
    parser.add_argument(
        "--peak-of",
        choices=MODELS,
        help="only print a layer's peak memory and largest tensor in bytes, in the first case and "
        "dtype; the script calls itself with it",
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Do what the options ask for.

    Raises ValueError when that is impossible.
    """
    benchmark = MemoryBenchmark(options)
    if options.peak_of:
        print(*benchmark.own_memory(options.peak_of))
        return
    output = options.output.resolve() if options.output else None
    if output:
        check_output(output)
    hardware = hardware_line(benchmark.device)
    print(hardware)
    warning = load_warning(os.getloadavg()[0])
    if warning:
        print(warning)
    measurements, circumstances = benchmark.run()
    for case, difference in circumstances["largest_output_difference_fp32"].items():
        print(f"{case}: outputs differ by {difference:.1g} at most")
    report = MemoryReport(measurements, MODELS, "slots")
    for line in [*circumstances["left_out"], *report.warnings()]:
        print(line)
    for text in report.tables():
        print(f"\n{text}")
    rates = circumstances["multiply_adds_per_second"]
    print(
        EXPLANATION.format(
            width=WIDTH,
            query_width=QUERY_WIDTH,
            rows=FIXED_ROWS,
            ours=MODELS.ours,
            steps=benchmark.steps,
            rates=", ".join(f"{dtype} {rate / 1e9:,.0f}" for dtype, rate in rates.items()),
            copied=circumstances["copied_bytes_per_second"] / 1e9,
            hardware=hardware,
        )
    )
    if output:
        report.write(output, circumstances)
        print(f"written to {short(output)}/benchmark.json and {short(output)}/benchmark.png")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    options = parse_options(arguments)
    try:
        run(options)
    except KeyboardInterrupt:
        print("\ninterrupted, nothing was written; the same command starts anew")
        return 130
    except torch.OutOfMemoryError as error:
        print(f"error: {error}: give smaller --slots", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
