"""What the quickstarts share: commands shown and run, a training that can be interrupted."""

import argparse
import fcntl
import json
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from tqdm import tqdm

from scripts._shared.command_line import command_parser, exit_status, make_output_folder
from scripts._shared.commands import child_process, format_command, program, short
from scripts._shared.files import atomic_write, write_json

# Lines of fairseq's log with figures: of the training since the last such line, of a validation.
_FIGURES = re.compile(r"\| (train_inner|valid) \| (\{.*\})$")


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


@dataclass
class Progress:
    """Progress of a training: a bar in a terminal, a line every 10 % elsewhere.

    Args:
        done: updates before this training.
        goal: updates at its end.
        unit: of the losses.
        scales: what turns bits a token into that unit, of "training" and of "validation".
    """

    done: int
    goal: int
    unit: str
    scales: dict[str, float]
    losses: dict[str, float] = field(default_factory=dict)
    # a line that waits for the validation after the same update
    due: bool = False

    def __post_init__(self):
        self.started = time.monotonic()
        self.bar = tqdm(
            total=self.goal, initial=self.done, desc="training", unit=" updates", disable=None
        )

    def read(self, line: str) -> None:
        """Show what a line of fairseq's log tells."""
        found = _FIGURES.search(line)
        if not found:
            return
        part, prefix = ("validation", "valid_") if found[1] == "valid" else ("training", "")
        if part == "training":
            self.tell()
        figures = json.loads(found[2])
        # with smoothed labels, the loss of the labels themselves
        loss = figures.get(f"{prefix}nll_loss", figures[f"{prefix}loss"])
        self.losses[part] = float(loss) * self.scales[part]
        updates, before = int(figures[f"{prefix}num_updates"]), self.done
        self.done = updates
        self.due = self.due or 10 * updates // self.goal > 10 * before // self.goal
        self.bar.set_postfix_str(self.told(), refresh=False)
        self.bar.update(updates - before)
        if part == "validation":
            self.tell()

    def told(self) -> str:
        """The last losses of both parts."""
        losses = ", ".join(f"{name} {loss:.3f}" for name, loss in self.losses.items())
        return f"{losses} {self.unit}"

    def tell(self) -> None:
        """Print the line that is due, where there is no bar."""
        if self.due and self.bar.disable:
            seconds = time.monotonic() - self.started
            percent = 100 * self.done // self.goal
            print(f"{percent:3} %, {seconds:3.0f} s: {self.told()}", flush=True)
        self.due = False


@dataclass(frozen=True)
class Training:
    """A training in a working folder that goes on from its last checkpoint.

    Args:
        script: file of scripts/ whose TRAINING_OPTIONS are among the options.
        output: working folder, with checkpoints, train.log and training.json.
        options: all options of fairseq-train but those of folders and of the log.
    """

    script: str
    output: Path
    options: list[str]

    @property
    def data(self) -> Path:
        """Folder that fairseq-preprocess wrote."""
        return self.output / "data" / "bin"

    @property
    def checkpoint(self) -> Path:
        """File from which training goes on."""
        return self.output / "checkpoints" / "checkpoint_last.pt"

    @property
    def log(self) -> Path:
        """File with fairseq's messages."""
        return self.output / "train.log"

    @property
    def goal(self) -> int:
        """Number of updates at the end."""
        return int(option(self.options, "--max-update"))

    def check_options(self) -> None:
        """Record options and dictionary, so that training goes on with the same ones only.

        Raises ValueError when the checkpoint was trained with others.
        """
        record = self.output / "training.json"
        # with another Python's text, the model's symbols would stand for other units
        dictionaries = [path.read_bytes() for path in sorted(self.data.glob("dict*.txt"))]
        now = {"options": self.options, "dictionary": sha256(b"".join(dictionaries)).hexdigest()}
        trained = self.checkpoint.exists() and record.exists()
        if trained and json.loads(record.read_text(encoding="utf-8")) != now:
            raise ValueError(
                f"{short(self.checkpoint)} was trained with another dictionary, or with other "
                f"options than TRAINING_OPTIONS of scripts/{self.script} (see {short(record)}): "
                f"remove {short(self.output)} or give another folder with --output"
            )
        write_json(record, now)

    def progress(self) -> tuple[int, float]:
        """Updates done and seconds trained, zeros without a checkpoint.

        Raises ValueError when the checkpoint holds more than weights and options.
        """
        if not self.checkpoint.exists():
            return 0, 0.0
        # torch takes seconds to import, a first run does without it until here.
        import torch

        # The options of models that fairseq builds from parsed arguments.
        torch.serialization.add_safe_globals([argparse.Namespace])
        try:
            state = torch.load(self.checkpoint, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{short(self.checkpoint)} holds more than weights and options and is not loaded: "
                f"remove {short(self.output)} or give another folder with --output"
            ) from error
        updates = state["optimizer_history"][-1]["num_updates"]
        return updates, state["extra_state"]["previous_training_time"]

    def command(self) -> list[str]:
        """fairseq-train command; raises ValueError when fairseq is not installed."""
        words = [program("fairseq-train"), short(self.data), *self.options]
        words += ["--save-dir", short(self.checkpoint.parent), "--log-format", "json"]
        return [*words, "--log-interval", str(max(1, self.goal // 100))]

    def run(
        self, title: str, unit: str = "bits a token", scales: dict[str, float] | None = None
    ) -> None:
        """Train to --max-update, or do nothing if that is done.

        Args:
            title: what is printed above the command.
            unit: of the losses that are shown.
            scales: what turns bits a token into that unit, of "training" and of "validation".

        Raises ValueError when training fails or its checkpoint has other options.
        """
        repair_checkpoints(self.checkpoint.parent)
        self.check_options()
        updates, _ = self.progress()
        if updates >= self.goal:
            print(f"\n{title}: {updates} of {self.goal} updates done, nothing left to do")
            return
        words = self.command()
        announce(f"{title}, {updates} of {self.goal} updates done", words)
        print(f"fairseq's log: {short(self.log)}", flush=True)
        scales = scales or {"training": 1.0, "validation": 1.0}
        shown = Progress(updates, self.goal, unit, scales)
        # without a checkpoint the log is of updates that are lost
        goes_on = updates > 0 and self.log.exists()
        start = self.log.stat().st_size if goes_on else 0
        with (
            shown.bar,
            child_process(words, self.log, append=goes_on) as child,
            self.log.open(encoding="utf-8", errors="replace") as log,
        ):
            log.seek(start)
            line, ended = "", False
            while not ended:
                time.sleep(0.2)
                ended = child.poll() is not None
                while part := log.readline():
                    line += part
                    if line.endswith("\n"):
                        shown.read(line)
                        line = ""
            shown.tell()


def repair_checkpoints(folder: Path) -> None:
    """Remove checkpoints cut short by Ctrl-C, and let the newest complete one be the last.

    fairseq copies each checkpoint to checkpoint_best.pt and checkpoint_last.pt, not atomically.
    """
    for leftover in folder.glob("*.tmp"):
        leftover.unlink()
    for path in folder.glob("checkpoint*.pt"):
        if not is_complete(path):
            path.unlink()
            print(f"removed {short(path)}: it was cut short")
    last = folder / "checkpoint_last.pt"
    complete = folder.glob("checkpoint_*_*.pt")
    newest = max(complete, key=lambda path: int(path.stem.split("_")[2]), default=None)
    if newest and not last.exists():
        with atomic_write(last) as partial:
            shutil.copyfile(newest, partial)
        print(f"{newest.name} is the last checkpoint now")


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint file is a whole zip archive, as torch.save writes it."""
    try:
        with ZipFile(checkpoint):
            return True
    except BadZipFile:
        return False


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other quickstarts out of a working folder; raises ValueError when one is in there."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ValueError(
            f"another quickstart is running in {short(folder)}: wait for its end, or give another "
            "folder with --output"
        ) from error
    finally:
        os.close(opened)


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
    output = parser.parse_args(arguments).output.resolve()

    def work() -> None:
        make_output_folder(output)
        with locked(output):
            (output / "checkpoints").mkdir(exist_ok=True)
            steps(output)

    return exit_status(work, f"`make {target}` goes on from the last checkpoint", output)
