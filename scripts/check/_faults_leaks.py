"""Memory (MiB), open files and threads of long runs: at the end, against the middle."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripts.check._faults_materials import TRAININGS, WORDS, Materials
from scripts.check._faults_programs import USER_DIR, Case, CaseFailedError, Program

# Seconds between two looks.
EVERY = 0.2
# By what each may have grown between the two: caches of the allocator fill slowly.
GROWTH = {"memory": 6, "files": 0, "threads": 0}
UNITS = {"memory": " MiB"}
# share of the time after which everything is there that a run needs
WARM = 0.4


class Held(NamedTuple):
    """What a process holds: MiB of resident memory, open files, threads."""

    memory: int
    files: int
    threads: int


def held_by(pid: int) -> Held:
    """What a process holds; raises OSError when it has ended."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    files, threads = (len(list((process / name).iterdir())) for name in ("fd", "task"))
    return Held(pages * 4096 >> 20, files, threads)


def watch(words: tuple[Any, ...], folder: Path, limit: float, text: str = "") -> str:
    """Run a program; return its figures in words, raises CaseFailedError where they grow."""
    program = Program(words, folder, text=text)
    seen: list[tuple[float, Held]] = []
    started = time.monotonic()
    while not program.ends_within(EVERY) and time.monotonic() - started < limit:
        try:
            seen.append((time.monotonic() - started, held_by(program.pid)))
        except (OSError, IndexError):
            break
    outcome = program.wait(1)
    if outcome.status != 0:
        raise CaseFailedError(f"it ends with exit status {outcome.status}: {outcome.last}")
    # the last look may be at a process that is ending
    warm = [held for second, held in seen if second > WARM * seen[-1][0]][:-1]
    if len(warm) < 10:
        raise CaseFailedError(f"it was too short to see: {outcome.seconds:.1f} s")
    part = len(warm) // 4
    told, leaks = [], False
    for name, growth in GROWTH.items():
        before, after = (
            [getattr(look, name) for look in looks] for looks in (warm[:part], warm[-part:])
        )
        told.append(f"{name} {max(before)} and then {max(after)}{UNITS.get(name, '')}")
        # what comes and goes, such as a thread that reads batches ahead, is no leak
        leaks |= min(after) > max(before) + growth
    if leaks:
        raise CaseFailedError(", ".join(told))
    return ", ".join(told)


def cases(materials: Materials, quick: bool, draw: random.Random) -> Iterator[Case]:
    """Long trainings, validations, generations and an evaluation."""
    updates = 2_000 if quick else 20_000
    papers = ["transformer_xl"] if quick else list(TRAININGS)
    limit = 120 if quick else 3600

    def case(name: str, words: Any, text: str = "") -> Case:
        return Case(name, lambda folder: watch(words(folder), folder, limit, text))

    for paper in papers:

        def training(folder: Path, paper: str = paper) -> tuple[Any, ...]:
            often = ("--validate-interval-updates", max(1, updates // 50), "--log-interval", 100)
            return materials.training(
                paper, folder / "model", "--max-update", updates, *often, "--no-save"
            )

        yield case(f"{paper}: {updates:,} updates and 50 validations", training)
    if quick:
        return
    prompts = "".join(f"{' '.join(draw.choices(WORDS, k=3))}\n" for _ in range(200))
    yield case(
        "200 generations",
        lambda folder: (
            *("fairseq-interactive", materials.text, *USER_DIR, "--cpu", "--beam", 2),
            *("--task", "segment_language_modeling", "--max-len-b", 40),
            *("--path", materials.wide),
        ),
        prompts,
    )
    yield case(
        "an evaluation of 100,000 tokens in segments of 16",
        lambda folder: (
            *materials.evaluation(materials.wide, data=materials.long),
            *("--tokens-per-sample", 16, "--batch-size", 1),
        ),
    )
