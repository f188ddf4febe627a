"""The same answer whatever computes it: workers, parts, segments, threads, precision, releases."""

import os
import random
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.check._faults_load import LINE
from scripts.check._faults_materials import TRAININGS, Materials, logged
from scripts.check._faults_programs import (
    LIMIT,
    ROOT,
    Case,
    CaseFailedError,
    Outcome,
    Program,
    check_refusal,
    run,
    succeed,
)

UPDATES = 8
# Largest difference of a loss that the log shows with three or four digits.
LOGGED = 0.002
# Largest difference of a log-probability in single precision from that in double precision.
SINGLE = 1e-5
# each: what is changed, and what is changed with it so that the answer is the same
TRAINED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "2 parts of a batch": ("transformer_xl", ("--batch-split", 2)),
    "4 parts of a batch": ("transformer_xl", ("--batch-split", 4)),
    "2 processes that load": ("product_key_memory", ("--num-workers", 2)),
    "2 processes that load pairs": ("weighted_transformer", ("--num-workers", 2)),
    "the plain kernel": ("transformer_xl", ("--attention-kernel", "plain")),
    "activations computed again": ("transformer_xl", ("--checkpoint-activations",)),
}
# An epoch has a number of these batches that 2 and 3 do not divide: a worker gets an empty one.
BATCHES: dict[str, tuple[Any, ...]] = {
    "product_key_memory": ("--batch-size", 13),
    "weighted_transformer": ("--max-tokens", 165),
}
# how a text is scored by a model whose memory holds all of it
ALL = ("--model-overrides", "{'mem_len': 400}", "--batch-size", 1)
SCORED: dict[str, tuple[Any, ...]] = {
    f"segments of {length}": ("--tokens-per-sample", length, *ALL) for length in (1, 3, 50, 157)
}


def losses(outcome: Outcome) -> list[float]:
    """Losses that a training logged, in order."""
    values = [values for _, values in sorted(logged(outcome.printed).items())]
    return [float(value.get("loss") or value["valid_loss"]) for value in values]


def check_close(found: list[float], expected: list[float], most: float, what: str) -> str:
    """By how much two lists of numbers differ; raises CaseFailedError when that is too much."""
    if len(found) != len(expected) or not found:
        raise CaseFailedError(f"{len(found)} {what}, where there were {len(expected)}")
    differences = [abs(one - two) for one, two in zip(found, expected, strict=True)]
    # a comparison with NaN is false
    if not all(difference <= most for difference in differences):
        raise CaseFailedError(f"{what} differ by {max(differences):.2g}, more than {most}")
    return f"{what} differ by {max(differences):.1g}" if max(differences) else f"the same {what}"


def short_training(
    materials: Materials, paper: str, folder: Path, *options: Any
) -> tuple[Any, ...]:
    """Words of a training without dropout."""
    given = ("--dropout", 0, "--attention-dropout", 0, "--max-update", UPDATES, "--no-save")
    return materials.training(paper, folder / "model", *given, *options)


def train_otherwise(materials: Materials, name: str, folder: Path) -> str:
    """Compare a training with one that computes the same in another way."""
    paper, options = TRAINED[name]
    one = succeed(short_training(materials, paper, folder), folder / "one")
    other = succeed(short_training(materials, paper, folder, *options), folder / "other")
    return check_close(losses(other), losses(one), LOGGED, "losses")


def train_on_workers(materials: Materials, paper: str, workers: int, folder: Path) -> str:
    """Compare a training on some workers with one that has all their text.

    One worker has the streams of all where there are streams; elsewhere it adds up as many batches.
    """
    streams = 6
    alone = ("--batch-size", streams)
    each = ("--batch-size", streams // workers, "--tokens-per-sample", 32)
    words = short_training(materials, paper, folder, *each)
    if paper in BATCHES:
        alone = ("--update-freq", workers)
        words = short_training(materials, paper, folder, *BATCHES[paper])
    together = materials.together(workers)
    one = succeed((*words, *alone), folder / "one")
    programs = [
        Program((*words, *together, "--distributed-rank", rank), folder / f"worker {rank}")
        for rank in range(workers)
    ]
    outcomes = [program.wait() for program in programs]
    if '"epoch": 2' not in one.printed:
        raise CaseFailedError("no epoch has ended, where workers have less to do than others")
    for program in programs:
        program.kill(True)
    for outcome in outcomes:
        if outcome.status != 0:
            raise CaseFailedError(f"a worker ends with {outcome.status}: {outcome.last}")
    return check_close(losses(outcomes[0]), losses(one), LOGGED, "losses")


def score_otherwise(materials: Materials, name: str, folder: Path) -> str:
    """Compare the loss of a text with that in segments of 8."""
    checkpoint = materials.checkpoints["transformer_xl"]
    found = [
        succeed(materials.evaluation(checkpoint, *options), folder / place)
        for place, options in (("one", ALL), ("other", SCORED[name]))
    ]
    one, other = ([float(re.search(r"Loss \(base 2\): ([\d.]+)", x.printed)[1])] for x in found)
    return check_close(other, one, LOGGED, "losses")


def log_probabilities(
    materials: Materials, checkpoint: Path, folder: Path, dtype: str = "float32", threads: int = 1
) -> list[float]:
    """Log-probabilities of the symbols of a line."""
    words = ("scripts.check._faults_load", checkpoint, materials.text, dtype)
    printed = succeed(words, folder, inject=lambda: torch.set_num_threads(threads)).printed
    return [float(word) for word in printed.splitlines()[-1].split()]


def compare_scores(materials: Materials, paper: str, change: dict[str, Any], folder: Path) -> str:
    """Compare log-probabilities of a line in single precision on one thread with others."""
    # PyTorch gives small matrices to one thread
    checkpoint = materials.wide if "threads" in change else materials.checkpoints[paper]
    one = log_probabilities(materials, checkpoint, folder / "one")
    other = log_probabilities(materials, checkpoint, folder / "other", **change)
    if len(one) != len(LINE.split()) + 1 and len(one) != len(LINE.split()):
        raise CaseFailedError(f"{len(one)} symbols are scored of {len(LINE.split())}")
    return check_close(other, one, SINGLE, "log-probabilities")


def printed_by(python: Path, *words: Any) -> str:
    """What another environment's Python prints; raises CaseFailedError when it fails."""
    done = subprocess.run(
        [python, *map(str, words)],
        timeout=LIMIT,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise CaseFailedError(f"{python} ends with {done.returncode}: {done.stdout[-300:]}")
    return done.stdout


def releases(python: Path) -> str:
    """The releases of Python and PyTorch in another environment; raises as printed_by."""
    code = "import platform, torch; print(platform.python_version(), torch.__version__)"
    return "CPython {}, PyTorch {}".format(*printed_by(python, "-c", code).split()[-2:])


def score_with(materials: Materials, python: Path, folder: Path) -> str:
    """Compare log-probabilities of a line with those of another Python's PyTorch."""
    checkpoint = materials.checkpoints["transformer_xl"]
    one = log_probabilities(materials, checkpoint, folder / "one")
    printed = printed_by(python, "-m", "scripts.check._faults_load", checkpoint, materials.text)
    other = [float(word) for word in printed.splitlines()[-1].split()]
    return check_close(other, one, SINGLE, "log-probabilities")


def train_with(materials: Materials, python: Path, paper: str, folder: Path) -> str:
    """Compare the losses of a training with those of another Python's PyTorch."""
    words = short_training(materials, paper, folder)
    one = losses(succeed(words, folder / "one"))
    printed = printed_by(python, "-m", "fairseq_cli.train", *words[1:])
    return check_close(losses(Outcome(0, printed, 0.0)), one, LOGGED, "losses")


def two_at_once(materials: Materials, folder: Path) -> None:
    """Start the same training twice in one folder: the second is refused, the first goes on."""
    # far longer than the second waits
    words = materials.training("transformer_xl", folder / "model", "--max-update", 10**6)
    first, first_prints = Program(words, folder / "first"), folder / "first" / "printed"
    while not first.ends_within(0.1) and "num_updates" not in (first_prints.read_text()):
        continue
    second = run(words, folder / "second")
    trains = not first.ends_within(0)
    first.kill(True)
    outcome = first.wait()
    if not trains:
        raise CaseFailedError(f"the first ends with {outcome.status}: {outcome.last}")
    check_refusal(second, "--save-dir", str(folder / "model"), "another training is writing")


def cases(
    materials: Materials, quick: bool, draw: random.Random, pythons: Sequence[Path] = ()
) -> Iterator[Case]:
    """All comparisons, or some of them."""
    found = [Case("two trainings in one folder", lambda folder: two_at_once(materials, folder))]

    def add(name: str, work: Any, *given: Any) -> None:
        found.append(Case(name, lambda folder: work(materials, *given, folder)))

    for name in TRAINED:
        add(f"training: {name}", train_otherwise, name)
    for paper in TRAININGS:
        for workers in (2, 3):
            add(f"training: {paper} on {workers} workers", train_on_workers, paper, workers)
    for name in SCORED:
        add(f"scoring: {name}", score_otherwise, name)
    for paper in ("transformer_xl", "all_attention", "product_key_memory"):
        add(f"scoring: {paper} in float64", compare_scores, paper, {"dtype": "float64"})
    for threads in (2, 4):
        name = f"scoring: width 256 on {threads} threads"
        add(name, compare_scores, "transformer_xl", {"threads": threads})
    chosen = draw.sample(found, 4) if quick else found
    found = []
    for python in pythons:
        name = releases(python)
        add(f"scoring: {name}", score_with, python)
        for paper in TRAININGS:
            add(f"training: {paper} with {name}", train_with, python, paper)
    yield from chosen + found
