"""Print and run commands: programs of this environment, and their logs."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

# holds scripts, benchmarks and examples
FOLDER = Path(__file__).resolve().parents[2]
# an installed wheel has these modules, too, and runs them as fairseq-plugins
IN_REPOSITORY = (FOLDER / "pyproject.toml").exists()
ROOT = FOLDER if IN_REPOSITORY else Path.cwd()
# how many lines of a log an error has
LAST_LINES = 10


def name_commands(text: str) -> str:
    """Return a text with the commands that it names, as this installation runs them."""
    return text if IN_REPOSITORY else re.sub(r"python -m scripts\.([\w.]+)", _installed_name, text)


def as_installed(words: list[str]) -> list[str]:
    """Return the words of ``python -m scripts.…`` as this installation runs them."""
    if IN_REPOSITORY or words[:2] != ["python", "-m"]:
        return words
    return ["fairseq-plugins", *words[2].split(".")[1:], *words[3:]]


def _installed_name(command: re.Match) -> str:
    return f"fairseq-plugins {command[1].rstrip('.').replace('.', ' ')}"


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
    if not IN_REPOSITORY:
        return [program("fairseq-plugins"), *command.split(".")]
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


def run_child(words: list[str], log: Path | None = None, text: str | None = None) -> None:
    """Run a command at the root, with ``text`` as its input; write its output to the log, if any.

    Raises ValueError, with the log's last lines, if the exit status is not 0.
    """
    # Symbols are not ASCII, so the child must not use the locale's encoding for them.
    # Warnings of fairseq about its own use of hydra and torch would bury what matters.
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore"}
    with log.open("wb") if log else nullcontext() as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT} if log else {}
        stdin = None if text is None else text.encode()
        child = subprocess.run(
            words, cwd=ROOT, env=environment, input=stdin, check=False, **streams
        )
    if child.returncode:
        location, end = "above", ""
        if log:
            lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
            location, end = "below", "".join(f"\n    {line}" for line in lines)
        raise ValueError(
            f"{Path(words[0]).name} ended with exit status {child.returncode}: "
            f"fix the cause given in its messages {location} and run the same command again{end}"
        )
