"""Print and run commands: programs of this environment, Ctrl-C, logs."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Seconds to wait for a child to end after Ctrl-C, before it is killed.
PATIENCE = 5.0


def short(path: Path) -> str:
    """Return a path in the repository relative to its root, and any other path as it is."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def program(name: str) -> str:
    """Return the path of the console script beside the running Python, for a shell at the root."""
    path = Path(sys.executable).with_name(name)
    if not path.exists():
        raise ValueError(
            f"{name} is not installed beside {sys.executable}: install the project into this "
            "Python's environment, or use the Python of the environment that has it"
        )
    return short(path)


def python_command(command: str) -> list[str]:
    """Return the words that run a command of this repository, such as ``prepare.enwik8``."""
    return [program(Path(sys.executable).name), "-m", f"scripts.{command}"]


def format_command(words: list[str], width: int = 96) -> str:
    """Format a shell command, with line breaks before options where it is too long."""
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


@contextmanager
def child_process(words: list[str], log: Path | None = None) -> Iterator[subprocess.Popen]:
    """Run a command at the root during the block; write its output to the log if one is given.

    Raises ValueError if the exit status is not 0.
    """
    # Symbols are not ASCII, so the child must not use the locale's encoding for them.
    # Warnings of fairseq about its own use of hydra and torch would bury what matters.
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore"}
    with ExitStack() as stack:
        streams = {}
        if log:
            output = stack.enter_context(log.open("wb"))
            streams = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
        child = stack.enter_context(subprocess.Popen(words, cwd=ROOT, env=environment, **streams))
        try:
            yield child
            child.wait()
        except BaseException:
            # the child may have got the terminal's Ctrl-C already
            child.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(PATIENCE)
            child.kill()
            raise
    if child.returncode:
        location = f"in {short(log)}" if log else "above"
        raise ValueError(
            f"{Path(words[0]).name} ended with exit status {child.returncode}: "
            f"fix the cause given in its messages {location} and run the same command again"
        )
