"""The first eight minutes on a GPU: what is right, how fast it is, and what training gains.

    python -m benchmarks.gpu [--output gpu] [--original PATH ...] [--data FOLDER] [--rehearse]

Four stages, each with its own limit, one after the other. Each writes its results as they come, so
that nothing is lost when its time is up, and a stage that fails does not stop the next:

1. kernels (60 s): every kernel of attention against float64, with gradients.
2. speed (150 s): tokens per second, memory and waits of training and evaluation in bf16.
3. tests (180 s): commands, precisions and waits of all four papers' models.
4. training (90 s): loss against time of a Transformer-XL with each kernel.

FOLDER has binarized text with a part `valid`; without it, Python's own source is prepared first.
--rehearse runs everything on the CPU with tiny sizes. Results are in OUTPUT: kernels.xml, speed/,
tests.xml, training.json, and report.md with the tables.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from scripts._shared.command_line import exit_status
from scripts._shared.commands import ROOT
from scripts._shared.files import write_json
from scripts._shared.results import markdown_table, prepare_results

MODEL = """
    --arch transformer_xl --decoder-layers 12 --decoder-embed-dim 512 --decoder-attention-heads 8
    --decoder-ffn-embed-dim 2048 --tokens-per-sample 512 --mem-len 512 --batch-size 16 --bf16
    --dropout 0.1 --lr 0.00025 --warmup-updates 200 --log-interval 10
"""
TINY_MODEL = """
    --arch transformer_xl --decoder-layers 1 --decoder-embed-dim 16 --decoder-attention-heads 2
    --decoder-ffn-embed-dim 32 --tokens-per-sample 32 --mem-len 32 --batch-size 4 --cpu
    --lr 0.004 --warmup-updates 10 --log-interval 1
"""
TRAINING = """
    --user-dir fairseq_plugins --task segment_language_modeling --distributed-world-size 1
    --optimizer adam --clip-norm 0.25 --lr-scheduler inverse_sqrt --max-update 1000000
    --no-save --disable-validation --log-format json --seed 1
"""
# on a GPU, fast means sdpa
TRAINED = ("sdpa", "plain")


class Stage(NamedTuple):
    """A part of the run: its name, its limit in seconds, and its commands, which share it."""

    name: str
    seconds: float
    commands: Sequence[Sequence[str]]


def run_stage(stage: Stage, output: Path) -> dict[str, object]:
    """Run a stage's commands into logs; return exit statuses and seconds.

    A command has an equal share of the time that is left. It is interrupted as by Ctrl-C.
    """
    statuses, began = [], time.monotonic()
    for number, words in enumerate(stage.commands):
        left = stage.seconds - (time.monotonic() - began)
        share = left / (len(stage.commands) - number)
        with open(output / f"{stage.name}_{number}.log", "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                words, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                statuses.append(process.wait(max(share, 1)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                statuses.append("time is up")
    seconds = round(time.monotonic() - began, 1)
    return {"stage": stage.name, "exit statuses": statuses, "seconds": seconds}


def stages(options: argparse.Namespace) -> list[Stage]:
    """Return the stages; a rehearsal has the same ones with tiny sizes."""
    output, rehearse = options.output.resolve(), options.rehearse
    python = [sys.executable, "-m"]

    def tests(name: str, rehearsed: str, *files: str) -> list[str]:
        only = ["-k", rehearsed] if rehearse else ["-m", "gpu"]
        return [*python, "pytest", "-n", "0", "-rfE", *only, f"--junitxml={output / name}", *files]

    speed = [*python, "benchmarks", "--output", str(output / "speed")]
    speed += ["--quick", "--turns", "1"] if rehearse else ["--first", "--turns", "5"]
    # few CPUs have units for bf16
    device, dtype = ("cpu", "fp32") if rehearse else ("cuda", "bf16")
    speed += ["--device", device, "--dtype", dtype]
    if options.original:
        speed += ["--original", *map(str, options.original)]
    model = (TINY_MODEL if rehearse else MODEL).split()
    train = [*python, "fairseq_cli.train", str(options.data.resolve()), *TRAINING.split()]
    trainings = [[*train, *model, "--attention-kernel", kernel] for kernel in TRAINED]
    files = "tests/gpu/test_models.py", "tests/gpu/test_commands.py"
    return [
        Stage("kernels", 60, [tests("kernels.xml", "cpu", "tests/gpu/test_kernels.py")]),
        Stage("speed", 150, [speed]),
        Stage("tests", 180, [tests("tests.xml", "cpu and fp32", *files)]),
        Stage("training", 60 if rehearse else 90, trainings),
    ]


def read_training(log: Path) -> list[tuple[float, int, float]]:
    """Return seconds, updates and bits per token of each line of a training's log."""
    lines = (json.loads(line) for line in re.findall(r"\{.*\"num_updates\".*\}", log.read_text()))
    return [(float(x["wall"]), int(x["num_updates"]), float(x["loss"])) for x in lines]


def report(output: Path, done: Sequence[dict[str, object]]) -> None:
    """Write the tables of what ran so far."""
    curves = {
        kernel: read_training(log)
        for number, kernel in enumerate(TRAINED)
        if (log := output / f"training_{number}.log").exists()
    }
    write_json(output / "training.json", curves)
    rows = [[kernel, *map(str, curve[-1])] for kernel, curve in curves.items() if curve]
    text = markdown_table(
        ["stage", "exit status", "seconds"], [[str(x) for x in d.values()] for d in done]
    )
    text += "\n\n" + markdown_table(["kernel", "seconds", "updates", "bits per token"], rows)
    if (speed := output / "speed_0.log").exists():
        text += "\n\n" + speed.read_text(encoding="utf-8")
    (output / "report.md").write_text(text + "\n", encoding="utf-8")


def run(options: argparse.Namespace) -> None:
    """Run the stages, and write the report after each."""
    prepare_results(options.output)
    if options.data is None:
        options.data = options.output / "data" / "bin"
        folder = str(options.output.resolve() / "data")
        words = [sys.executable, "-m", "scripts.prepare", "python_source"]
        subprocess.run([*words, "--output", folder], cwd=ROOT, check=True)
    done = []
    for stage in stages(options):
        print(f"{stage.name}: at most {stage.seconds} s", flush=True)
        done.append(run_stage(stage, options.output))
        print(done[-1], flush=True)
        report(options.output, done)
    print((options.output / "report.md").read_text(encoding="utf-8"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add: Callable[..., object] = parser.add_argument
    add("--output", type=Path, default=Path("gpu"), help="folder of the results (gpu)")
    add("--original", nargs="+", type=Path, default=[], help="checkouts of the published code")
    add("--data", type=Path, help="binarized text; without it, Python's source is prepared")
    add("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    options = parser.parse_args(arguments)
    return exit_status(lambda: run(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
