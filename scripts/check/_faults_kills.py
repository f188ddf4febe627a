"""Programs killed at random moments, after which the same command must end as if they were not.

A training must go on with the losses of the one that was never stopped, bit for bit, and end with
the same tensors. A preparation must end with the same bytes.
"""

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from scripts.check._faults_materials import TRAININGS, Materials, logged
from scripts.check._faults_preparations import Preparation, preparations
from scripts.check._faults_programs import (
    Case,
    CaseFailedError,
    CaseSkippedError,
    Known,
    Outcome,
    Program,
    read_tensors,
    run,
    trained_tensors,
)

UPDATES = 30
# how often a kill is tried, each time earlier, while the program ends before it
TRIES = 8
ENDED = "it had ended before the moment of the kill"
OUTLIVES = "what it started outlives it"
HANGS = Known(
    f"^{OUTLIVES}",
    "When its parent is killed, a program gets Ctrl-C. If that comes while Python starts a pool of "
    "processes, some of these may wait for ever. End them by hand: what they wrote is not used.",
    always=False,
)
OFTEN = ("--max-update", UPDATES, "--save-interval-updates", 3, "--keep-interval-updates", 2)


class Moment(NamedTuple):
    """When a program is killed.

    Attributes:
        share: of the time that it takes undisturbed; None to wait for a file being written.
        writes: how many times such a file is seen before.
        with_children: whether what it started is killed with it.
    """

    share: float | None
    writes: int
    with_children: bool

    def __str__(self) -> str:
        when = f"write {self.writes}" if self.share is None else f"{self.share:.0%}"
        return f"at {when}, {'with children' if self.with_children else 'alone'}"

    def earlier(self) -> "Moment":
        """The same kind of moment, sooner; of the first write, half of the time."""
        if self.share is not None:
            return self._replace(share=0.6 * self.share)
        if self.writes > 1:
            return self._replace(writes=2 * self.writes // 3)
        return self._replace(share=0.5)


def moments(draw: random.Random, number: int, writes: int) -> list[Moment]:
    """Random moments, of which every third is during one of so many writes of a file."""
    found = []
    for count in range(number):
        during = count % 3 == 2 and writes
        share = None if during else round(draw.uniform(0.02, 1), 3)
        found.append(Moment(share, draw.randint(1, max(1, writes)), count % 2 == 0))
    return found


def being_written(folder: Path) -> set[str]:
    """Names of the files in a folder that are being written."""
    try:
        return {x.name for pattern in ("*.tmp", "*.partial*") for x in folder.rglob(pattern)}
    except FileNotFoundError:
        # of a folder that went meanwhile
        return set()


def kill(program: Program, moment: Moment, seconds: float, output: Path) -> bool:
    """Kill a program at a moment; return whether it had not ended before."""
    deadline = time.monotonic() + (1.5 if moment.share is None else moment.share) * seconds
    seen, names = 0, set()
    while time.monotonic() < deadline and not program.ends_within(0.0005):
        if moment.share is not None:
            continue
        now = being_written(output.parent)
        seen += len(now - names)
        names = now
        if seen >= moment.writes:
            break
    program.kill(moment.with_children)
    return program.wait().status == -signal.SIGKILL


class KilledTraining:
    """The training of a paper, undisturbed and killed.

    Args:
        materials: what it reads.
        paper: which it is.
        workers: how many processes train together.
    """

    def __init__(self, materials: Materials, paper: str, workers: int = 1) -> None:
        self._materials = materials
        self._paper = paper
        self._workers = workers
        self._undisturbed: Outcome | None = None
        self._folder = materials.folder / "undisturbed" / f"{paper} on {workers}"

    @property
    def undisturbed(self) -> Outcome:
        """How the training ends that nobody kills."""
        if self._undisturbed is None:
            self._undisturbed = self._finish(self._folder / "model", self._folder)
        return self._undisturbed

    def _start(self, output: Path, folder: Path) -> list[Program]:
        words = self._materials.training(self._paper, output, *OFTEN)
        if self._workers == 1:
            return [Program(words, folder)]
        words += self._materials.together(self._workers)
        return [
            Program((*words, "--distributed-rank", rank), folder / f"worker {rank}")
            for rank in range(self._workers)
        ]

    def _finish(self, output: Path, folder: Path) -> Outcome:
        outcomes = [program.wait() for program in self._start(output, folder)]
        for outcome in outcomes:
            if outcome.status != 0:
                raise CaseFailedError(f"it ends with {outcome.status}: {outcome.last}")
        return outcomes[0]

    def run(self, moment: Moment, folder: Path) -> None:
        """Kill the training at a moment, run it again, and compare; raises CaseFailedError."""
        whole, output = self.undisturbed, folder / "model"
        programs = self._start(output, folder / "killed")
        killed = kill(programs[-1], moment, whole.seconds, output)
        for program in programs:
            # those that wait for the one that is killed
            program.kill(True)
            program.wait()
        left = sorted(output.glob("checkpoint*.pt"))
        for path in left:
            read_tensors(path)
        again = self._finish(output, folder / "again")
        if left and "resuming cold" in again.printed:
            raise CaseFailedError("it goes on without the recurrence that it had")
        self._compare(whole, again, output)
        if not killed:
            raise CaseSkippedError(ENDED)

    def _compare(self, whole: Outcome, again: Outcome, output: Path) -> None:
        expected, found = logged(whole.printed), logged(again.printed)
        for place, values in found.items():
            if values != expected.get(place):
                raise CaseFailedError(
                    f"{' after update '.join(map(str, place))} it logs other numbers"
                )
        places = self._folder / "model", output
        one, two = (trained_tensors(place / "checkpoint_last.pt") for place in places)
        if one.keys() != two.keys():
            raise CaseFailedError("the last checkpoint holds other tensors")
        different = [name for name in one if not torch.equal(one[name], two[name])]
        if different:
            raise CaseFailedError(
                f"{len(different)} of {len(one)} tensors differ, {different[0]} first"
            )


class KilledPreparation:
    """A command that writes files, undisturbed and killed.

    Args:
        folder: for the undisturbed run.
        preparation: the command.
    """

    def __init__(self, folder: Path, preparation: Preparation) -> None:
        self._folder = folder
        self._preparation = preparation
        self._expected: dict[str, str] | None = None
        self._seconds = 0.0

    def run(self, moment: Moment, folder: Path) -> None:
        """Kill the command at a moment, run it again, and compare.

        Raises CaseFailedError, and CaseSkippedError where packages are needed and cannot be had.
        """
        words, inject = self._preparation.words, self._preparation.inject
        content = self._preparation.content
        if self._expected is None:
            # of a case before, in which this failed
            shutil.rmtree(self._folder, ignore_errors=True)
            made = self._folder / "made"
            made.mkdir(parents=True)
            outcome = run(words(made / "output"), self._folder, inject=inject)
            if outcome.status != 0 and "could not be downloaded" in outcome.last:
                raise CaseSkippedError(outcome.last)
            if outcome.status != 0:
                raise CaseFailedError(f"undisturbed it ends with {outcome.status}: {outcome.last}")
            self._expected = content(made)
            self._seconds = outcome.seconds
        output = folder / "made" / "output"
        output.parent.mkdir(parents=True)
        program = Program(words(output), folder / "killed", inject=inject)
        killed = kill(program, moment, self._seconds, output)
        # at once, as a scheduler would, while what the first one started may still be there; where
        # it had ended, the command may say so
        again = run(words(output), folder / "again", inject=inject)
        if again.status != 0 and content(folder / "made") != self._expected:
            raise CaseFailedError(f"the same command ends with {again.status}: {again.last}")
        stayed = program.end_children()
        found = content(folder / "made")
        if found != self._expected:
            names = sorted(
                name
                for name in found.keys() | self._expected.keys()
                if found.get(name) != self._expected.get(name)
            )
            raise CaseFailedError(
                f"{len(names)} files differ from the undisturbed run's: {names[0]}"
            )
        if stayed:
            raise CaseFailedError(f"{OUTLIVES}: {', '.join(stayed)}")
        if not killed:
            raise CaseSkippedError(ENDED)


def kill_in_time(run: Callable[[Moment, Path], None], moment: Moment, folder: Path) -> None:
    """Try a kill, and where the program had ended before it, an earlier one; raises as ``run``."""
    for attempt in range(TRIES):
        try:
            return run(moment, folder / str(attempt))
        except CaseSkippedError as reason:
            if str(reason) != ENDED:
                raise
            moment = moment.earlier()
    raise CaseSkippedError(ENDED)


def cases(materials: Materials, quick: bool, draw: random.Random) -> Iterator[Case]:
    """Kills of the trainings and of the commands that write files."""
    trainings = [(paper, 1) for paper in TRAININGS] + [("transformer_xl", 2)]
    for paper, workers in trainings:
        training = KilledTraining(materials, paper, workers)
        named = f"train {paper}" + (f" on {workers} workers" if workers > 1 else "")
        for moment in moments(draw, 3 if quick else 25, UPDATES):
            yield Case(
                f"{named}, killed {moment}",
                partial(kill_in_time, training.run, moment),
            )
    for name, preparation in preparations(materials).items():
        killed = KilledPreparation(materials.folder / "undisturbed" / name, preparation)
        number = preparation.quick_kills if quick else preparation.kills
        for moment in moments(draw, number, preparation.writes):
            yield Case(
                f"{name}, killed {moment}",
                partial(kill_in_time, killed.run, moment),
                None if moment.with_children else HANGS,
            )
