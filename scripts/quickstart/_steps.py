"""What the quickstarts share: commands that are shown and run, training that can be interrupted."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from scripts._shared.command_line import command_parser
from scripts._shared.commands import child_process, format_command, program, short
from scripts._shared.files import write_json
from scripts.quickstart._checkpoints import repair_checkpoints, training_progress


def option(options: list[str], name: str) -> str:
    """Value of an option in a list of command line words."""
    return options[options.index(name) + 1]


def announce(title: str, words: list[str], before: str = "") -> None:
    """Print what a step is for and the command that it runs."""
    print(f"\n{title}\n$ {before}{format_command(words)}", flush=True)


def run_logged(words: list[str], log: Path, description: str, sent: str = "") -> str:
    """Run a command with its output in a log, showing the time it takes, and return the output.

    Raises ValueError when it fails.
    """
    with (
        child_process(words, log) as child,
        tqdm(desc=description, bar_format="{desc}: {elapsed}", leave=False, disable=None) as clock,
    ):
        child.stdin.write(sent.encode())
        child.stdin.close()
        while child.poll() is None:
            clock.refresh()
            time.sleep(0.2)
    return log.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Training:
    """A training in a working folder that goes on from its last checkpoint.

    Args:
        script: the quickstart, whose TRAINING_OPTIONS are among the options.
        output: working folder, with checkpoints and training.json.
        data: folder that fairseq-preprocess wrote.
        options: all options of fairseq-train but those of folders and of the log.
        log: file for fairseq's messages, beside showing them.
    """

    script: str
    output: Path
    data: Path
    options: list[str]
    log: Path | None = None

    @property
    def checkpoint(self) -> Path:
        """File from which training goes on."""
        return self.output / "checkpoints" / "checkpoint_last.pt"

    def check_options(self) -> None:
        """Record the training options, so that training goes on with the same ones only.

        Raises ValueError when the checkpoint was trained with other options.
        """
        record = self.output / "training.json"
        if self.checkpoint.exists() and record.exists():
            recorded = json.loads(record.read_text(encoding="utf-8"))["options"]
            if recorded != self.options:
                raise ValueError(
                    f"{short(self.checkpoint)} was trained with other options than "
                    f"TRAINING_OPTIONS of scripts/{self.script} (see {short(record)}): remove "
                    f"{short(self.checkpoint.parent)} or give another folder with --output"
                )
        write_json(record, {"options": self.options})

    def progress(self) -> tuple[int, float]:
        """Updates done and seconds trained, zeros without a checkpoint."""
        if not self.checkpoint.exists():
            return 0, 0.0
        # torch takes seconds to import, a first run does without it until here.
        from torch.serialization import add_safe_globals

        # The options of models that fairseq builds from parsed arguments.
        add_safe_globals([argparse.Namespace])
        return training_progress(self.checkpoint)

    def command(self, terminal: bool) -> list[str]:
        """fairseq-train command, with log lines in place of a progress bar off a terminal.

        Raises ValueError when fairseq is not installed.
        """
        words = [program("fairseq-train"), short(self.data), *self.options]
        words += ["--save-dir", short(self.checkpoint.parent)]
        words += ["--log-file", short(self.log)] if self.log else []
        return words if terminal else [*words, "--log-format", "simple", "--log-interval", "50"]

    def run(self, step: int, about: str, bar: str) -> None:
        """Train to --max-update, or do nothing if that is done.

        Args:
            step: number of the step.
            about: how long it takes.
            bar: what fairseq's bar does, with {goal} for the number of updates.

        Raises ValueError when training fails or its checkpoint has other options.
        """
        repair_checkpoints(self.checkpoint.parent)
        self.check_options()
        updates, _ = self.progress()
        goal = int(option(self.options, "--max-update"))
        if updates >= goal:
            print(
                f"\n[{step}] training: {updates} of {goal} updates done, nothing left to do",
                flush=True,
            )
            return
        words = self.command(terminal=sys.stderr.isatty())
        announce(
            f"[{step}] training: {about}, {updates} of {goal} updates done; fairseq's "
            f"bar\n    {bar.format(goal=goal)}",
            words,
        )
        with child_process(words):
            pass


def make_working_folder(output: Path) -> None:
    """Make the folder of --output; raises ValueError when it cannot be written."""
    try:
        (output / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output {short(output)} cannot be written ({error.strerror}): "
            "give a folder in a place where you may write"
        ) from error


def run_quickstart(
    steps: Callable[[Path], None],
    description: str,
    folder: Path,
    target: str,
    arguments: list[str] | None = None,
) -> int:
    """Command line of a quickstart; returns its exit status.

    Args:
        steps: do all in the working folder; raise ValueError when something is in the way.
        description: of the script.
        folder: working folder unless another is given.
        target: of the Makefile, which runs the script.
        arguments: the command line's.
    """
    parser = command_parser(description)
    parser.add_argument(
        "--output", type=Path, default=folder, help=f"working folder ({short(folder)})"
    )
    try:
        output = parser.parse_args(arguments).output.resolve()
        make_working_folder(output)
        steps(output)
    except KeyboardInterrupt:
        print(
            "\ninterrupted (a traceback above is fairseq's way to stop); "
            f"`make {target}` goes on from the last checkpoint"
        )
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
