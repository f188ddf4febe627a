"""Commands that the scripts show and run: programs of this environment, Ctrl-C, logs."""

import ctypes
import functools
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Seconds that a child gets to end by itself after Ctrl-C, and again after a signal of its own.
PATIENCE = 5.0
# Linux: the signal that a process gets at its parent's end. Found before there is a child, where
# little may be done.
_PR_SET_PDEATHSIG = 1
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def short(path: Path) -> str:
    """Path relative to the repository root where it lies inside, else absolute."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def program(name: str) -> str:
    """Path of the console script beside the running Python, as a shell at the root finds it."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise ValueError(
            f"{name} is not installed beside {sys.executable}: install the project into this "
            "Python's environment, or use the Python of the environment that has it"
        )
    return short(path)


def python_command(command: str) -> list[str]:
    """First words of a command of this repository: ``prepare.enwik8`` is one."""
    return [program(Path(sys.executable).name), "-m", f"scripts.{command}"]


def format_command(words: list[str], width: int = 96) -> str:
    """Shell command with its options on continued lines."""
    groups = [[words[0]]]
    for word in words[1:]:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    lines = [""]
    for group in map(shlex.join, groups):
        if len(lines[-1]) + len(group) > width and lines[-1]:
            lines.append("   ")
        lines[-1] = f"{lines[-1]} {group}" if lines[-1] else group
    return " \\\n".join(lines)


def end_with_parent(parent: int, number: int = signal.SIGINT) -> None:
    """Let this process, whose parent has that number, get a signal when its parent is killed.

    Without it the process would go on writing beside the next run. Only Linux knows how.
    """
    if _PRCTL:
        _PRCTL(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


def _begin_child(parent: int) -> None:
    """What a process does that is about to be a command."""
    # a shell that is not interactive has what it starts with & ignore it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent(parent)


def stop(child: subprocess.Popen) -> None:
    """End a child, which may have got Ctrl-C from the terminal already, and wait for its end."""
    # a second Ctrl-C would leave the child behind
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                child.wait(PATIENCE)
                return
            except subprocess.TimeoutExpired:
                child.send_signal(number)
        child.wait()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def child_process(
    words: list[str], log: Path | None = None, append: bool = False
) -> Iterator[subprocess.Popen]:
    """Run a command from the root during the block, its output to the log if one is given.

    With ``append`` what the log holds stays above it. Raises ValueError for another status than 0.
    """
    # The symbols are not ASCII: a child must not read or write them in the locale's encoding.
    # Warnings of fairseq about its own use of hydra and torch would bury what matters.
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore"}
    streams = {}
    if _PRCTL:
        streams["preexec_fn"] = functools.partial(_begin_child, os.getpid())
    with ExitStack() as stack:
        if log:
            streams |= {
                "stdin": subprocess.PIPE,
                "stdout": stack.enter_context(log.open("ab" if append else "wb")),
                "stderr": subprocess.STDOUT,
            }
        child = stack.enter_context(subprocess.Popen(words, cwd=ROOT, env=environment, **streams))
        try:
            yield child
            child.wait()
        except BaseException:
            stop(child)
            raise
    if child.returncode:
        place = f"in {short(log)}" if log else "above"
        raise ValueError(
            f"{Path(words[0]).name} ended with exit status {child.returncode}: "
            f"remove the cause named by its messages {place} and run the same command again"
        )
