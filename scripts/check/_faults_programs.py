"""Programs that a campaign of faults runs, each in a process of its own, and what came of them.

A program is forked from the campaign's process, which has imported fairseq and this package: that
saves the seconds that they take to import. It leads a process group of its own, so that a signal
can reach it alone or with its children.
"""

import gc
import hashlib
import importlib
import json
import logging
import math
import multiprocessing
import os
import re
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from tqdm import tqdm
from tqdm.std import TqdmDefaultWriteLock

import fairseq_plugins
from fairseq_plugins.fairseq_integration.sentences import tell_errors_in_a_sentence
from scripts._shared.commands import ROOT

USER_DIR = ("--user-dir", str(Path(fairseq_plugins.__file__).parent))
# Seconds after which a program hangs. Under load the slowest of them takes a quarter of that.
LIMIT = 120.0
# Bytes of memory that a program may map: one that asks for more must say so itself.
MEMORY = 12 << 30
# how long what a program has started may outlive it
AFTERWARDS = 10.0
FORK = multiprocessing.get_context("fork")
# what the programs import, and fork from here with it
_IMPORTED = (
    *(f"fairseq_cli.{name}" for name in ("preprocess", "train", "eval_lm", "generate")),
    *("fairseq_cli.interactive", "torch._dynamo", "numba", "scripts.convert.checkpoint"),
    *("scripts.prepare.translation", "scripts.convert.average"),
    *("scripts.evaluate.memory_usage", "scripts.plot.branch_weights"),
)


class CaseFailedError(Exception):
    """What a case found wrong, in a sentence."""


class CaseSkippedError(Exception):
    """Why a case cannot be tried here."""


class Known(NamedTuple):
    """A failure that is known.

    Attributes:
        pattern: regular expression that is found in what failed; any other failure is new.
        remedy: why it is there and what to do.
        always: whether the case fails each time that it is tried.
    """

    pattern: str
    remedy: str
    always: bool = True


class Case(NamedTuple):
    """A fault, and what is tried with it.

    Args:
        name: what it is called in the results.
        run: tries it in the empty folder that it gets, and may return figures; raises
            CaseFailedError or CaseSkippedError.
        known: how it fails, where that is known.
    """

    name: str
    run: Callable[[Path], str | None]
    known: Known | None = None


class Outcome(NamedTuple):
    """How a program ended.

    Attributes:
        status: exit status; minus the number of the signal that ended it; None if it hung.
        printed: standard output and error.
        seconds: how long it took.
    """

    status: int | None
    printed: str
    seconds: float

    @property
    def last(self) -> str:
        """Last lines of what it printed, for a report."""
        lines = [line.strip() for line in self.printed.splitlines() if line.strip()]
        return " / ".join(lines[-2:])[-300:]


def prepare_to_fork() -> None:
    """Import what programs need, and let them share it; before the first of them."""
    torch.set_num_threads(1)
    # fairseq's imports let every message of every library through
    level = logging.root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _IMPORTED:
            importlib.import_module(name)
    logging.root.setLevel(level)
    gc.collect()
    gc.freeze()


def ends_within(process: multiprocessing.Process, seconds: float) -> bool:
    """Wait for the end of a process for so long; return whether it has ended.

    Process.join would wait for what it has forked, too.
    """
    deadline = time.monotonic() + seconds
    while process.exitcode is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(seconds, 0.002))
    return True


class Program:
    """A program that has been started.

    Args:
        words: ``fairseq-NAME``, a module of this repository or ``bash``, and its arguments.
        folder: takes what it prints, its working folder and its folder for temporary files.
        text: its standard input.
        inject: is called in its process first.
        memory: bytes that it may map.
        piped: whether what it prints goes through a pipe, as it must where files are limited.
    """

    def __init__(
        self,
        words: tuple[Any, ...],
        folder: Path,
        text: str = "",
        inject: Callable[[], None] | None = None,
        memory: int = MEMORY,
        piped: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("here", "tmp"):
            (folder / name).mkdir(exist_ok=True)
        self._printed = folder / "printed"
        # for what is killed before it opens it
        self._printed.touch()
        (folder / "typed").write_text(text, encoding="utf-8")
        self._started = time.monotonic()
        sys.stdout.flush()
        self._reader = None
        if piped:
            os.mkfifo(folder / "pipe")
            with self._printed.open("wb") as file:
                self._reader = subprocess.Popen(["cat", folder / "pipe"], stdout=file)
        printed = folder / "pipe" if piped else self._printed
        arguments = (list(map(str, words)), folder, printed, inject, memory)
        self._process = FORK.Process(target=_be_program, args=arguments)
        self._process.start()
        self.pid = self._process.pid

    def wait(self, limit: float = LIMIT) -> Outcome:
        """Wait for its end; end it, with its children, where it takes longer or is piped."""
        hung = not ends_within(self._process, limit)
        if hung:
            self.kill(True)
            ends_within(self._process, math.inf)
        seconds = time.monotonic() - self._started
        if self._reader:
            # it reads on as long as a child has the pipe, or for ever where none has opened it
            self.kill(True)
            try:
                self._reader.wait(AFTERWARDS)
            except subprocess.TimeoutExpired:
                self._reader.kill()
                self._reader.wait()
        printed = self._printed.read_text(encoding="utf-8", errors="replace")
        return Outcome(None if hung else self._process.exitcode, printed, seconds)

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end for so long; return whether it has ended."""
        return ends_within(self._process, seconds)

    def kill(self, with_children: bool) -> None:
        """Kill it with a signal that no program can catch."""
        try:
            (os.killpg if with_children else os.kill)(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            # it has ended, or not made its group yet
            self._process.kill()

    def children(self) -> list[int]:
        """Processes of its group that live, zombies left out."""
        return [pid for pid, group, state in _processes() if group == self.pid and state != "Z"]

    def end_children(self) -> list[str]:
        """Wait for the end of what it started; kill and name what stays."""
        deadline = time.monotonic() + AFTERWARDS
        while (left := self.children()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = [_command_of(pid) for pid in left]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return names


def run(words: tuple[Any, ...], folder: Path, limit: float = LIMIT, **options: Any) -> Outcome:
    """Run a program to its end, as Program has it, and take away what it leaves running."""
    program = Program(words, folder, **options)
    try:
        return program.wait(limit)
    finally:
        program.kill(True)


def succeed(words: tuple[Any, ...], folder: Path, **options: Any) -> Outcome:
    """Run a program to its end; raises CaseFailedError when that is not exit status 0."""
    outcome = run(words, folder, **options)
    if outcome.status != 0:
        raise CaseFailedError(f"{words[0]} ended with {_named(outcome.status)}: {outcome.last}")
    return outcome


def check_refusal(outcome: Outcome, *parts: str) -> None:
    """Raise CaseFailedError when a program did not refuse as it should.

    That is: with another exit status than 0 and without a traceback, in a sentence that has all
    ``parts``, the thing and its value, and goes on, after a colon or semicolon, with what to do.
    A part stands alone, not within a word or number, and may have several forms: "1e9|1000".
    """
    if outcome.status is None:
        raise CaseFailedError(f"it hung for {outcome.seconds:.0f} s: {outcome.last}")
    if outcome.status <= 0:
        raise CaseFailedError(f"ended with {_named(outcome.status)}: {outcome.last}")
    if "Traceback (most recent call last)" in outcome.printed:
        raise CaseFailedError(f"a traceback: {outcome.last}")
    lines = outcome.printed.splitlines()
    start = next((n for n, line in enumerate(lines) if "error: " in line), None)
    if start is None:
        raise CaseFailedError(f"no line says what the error is: {outcome.last}")
    sentence = " ".join(lines[start:])
    forms = {part: "|".join(map(re.escape, part.split("|"))) for part in parts}
    missing = [x for x in parts if not re.search(rf"(?<![\w.])({forms[x]})(?!\w)", sentence)]
    if missing:
        raise CaseFailedError(f"it does not name {' and '.join(missing)}: {outcome.last}")
    # the system's own words are no remedy
    told = re.sub(r"\[Errno \d+\] [\w ]+(: )?", "", sentence.partition("error: ")[2])
    if not any(mark in told for mark in (": ", "; ", "choose from")):
        raise CaseFailedError(f"it does not say what to do: {outcome.last}")


def check_elsewhere(folder: Path) -> None:
    """Raise CaseFailedError for files in a program's working folder or that of temporary ones."""
    for name in ("here", "tmp"):
        left = sorted(path.name for path in (folder / name).iterdir())
        if left:
            raise CaseFailedError(f"it left {', '.join(left[:3])} in its folder {name}")


def digests(folder: Path) -> dict[str, str]:
    """Digest of each file of a folder but for logs, by name.

    Where a file names the folder, that name does not count. In JSON files times do not, and neither
    do the sizes of logs, which name the folder.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".log":
            content = path.read_bytes().replace(os.fsencode(folder), b"")
            if path.suffix == ".json":
                content = json.dumps(_repeatable(json.loads(content))).encode()
            found[path.relative_to(folder).as_posix()] = hashlib.sha256(content).hexdigest()
    return found


def tensors(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Tensors of what a checkpoint holds, by their place in it."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    parts: Any = ()
    if isinstance(state, Mapping):
        parts = state.items()
    elif isinstance(state, list | tuple):
        parts = enumerate(state)
    return {key: x for part, value in parts for key, x in tensors(value, f"{name}/{part}").items()}


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint; raises CaseFailedError when it cannot be read."""
    try:
        return tensors(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        raise CaseFailedError(f"{path.name} cannot be read: {error}") from error


def trained_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of a training's checkpoint but for the times in it; raises as read_tensors."""
    # meters hold times
    times = ("/extra_state/metrics/", "/extra_state/previous_training_time")
    return {name: x for name, x in read_tensors(path).items() if not name.startswith(times)}


def _named(status: int | None) -> str:
    return f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"


def _repeatable(content: Any) -> Any:
    if isinstance(content, dict):
        times = ("seconds", "minutes", ".log")
        return {k: _repeatable(v) for k, v in content.items() if not k.endswith(times)}
    if isinstance(content, list):
        return list(map(_repeatable, content))
    return content


def _processes() -> Iterator[tuple[int, int, str]]:
    """Process, its group and its state, for all that there are."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            yield int(entry.name), int(fields[2]), fields[0]


def _command_of(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "a process"
    return " ".join(Path(word).name for word in words[:3] if word)


def run_words(words: list[str], inject: Callable[[], None] | None = None) -> NoReturn:
    """Be a program in this process, whose streams, folder and environment are that program's."""
    if words[0] == "bash":
        os.execvp("bash", words)
    logging.root.handlers.clear()
    name = re.sub("^fairseq-", "fairseq_cli.", words[0]).replace("-", "_")
    sys.argv = words
    # done when the package is imported, which here is long ago
    tell_errors_in_a_sentence()
    # tqdm's lock is one for all processes that are forked, and a killed one never gives it back
    TqdmDefaultWriteLock.mp_lock, TqdmDefaultWriteLock.th_lock = FORK.RLock(), threading.RLock()
    tqdm.set_lock(TqdmDefaultWriteLock())
    try:
        if inject:
            inject()
        runpy.run_module(name, run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    sys.exit()


def _be_program(
    words: list[str],
    folder: Path,
    printed_to: Path,
    inject: Callable[[], None] | None,
    memory: int,
) -> None:
    """Be a program in the process that was forked for it."""
    os.setsid()
    # the campaign's own, which a program does not have
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    typed = os.open(folder / "typed", os.O_RDONLY)
    printed = os.open(printed_to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for opened, descriptor in ((typed, 0), (printed, 1), (printed, 2)):
        os.dup2(opened, descriptor)
    sys.stdin = os.fdopen(0, encoding="utf-8")
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, encoding="utf-8") for number in (1, 2))
    os.environ |= {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    os.chdir(folder / "here")
    warnings.filterwarnings("ignore", message=".* found in sys.modules after import")
    run_words(words, inject)
