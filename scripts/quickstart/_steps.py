"""Code that the quickstarts share: print and run commands, train with interruptions."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scripts._shared.checkpoints import read_checkpoint
from scripts._shared.command_line import command_parser, exit_status, make_output_folder
from scripts._shared.commands import (
    child_process,
    format_command,
    program,
    python_command,
    short,
)

# Log lines of fairseq with results: of training since the last such line, or of a validation.
_FIGURES = re.compile(r"\| (train_inner|valid) \| (\{.*\})$")


def option(options: list[str], name: str) -> str:
    """Return the value of an option in a list of command line words."""
    return options[options.index(name) + 1]


def announce(title: str, words: list[str], before: str = "") -> None:
    """Print the title of a step and the command that it runs."""
    print(f"\n{title}\n$ {before}{format_command(words)}", flush=True)


def run_logged(words: list[str], log: Path, stdin_text: str = "") -> str:
    """Run a command with the input ``stdin_text`` and its output in a log; return the output."""
    with child_process(words, log) as child:
        child.stdin.write(stdin_text.encode())
        child.stdin.close()
    return log.read_text(encoding="utf-8")


def parse_log_line(line: str) -> tuple[str, int, float] | None:
    """Return part, update and loss (bits per token) of a fairseq log line; None for other lines."""
    if not (found := _FIGURES.search(line)):
        return None
    part, prefix = ("validation", "valid_") if found[1] == "valid" else ("training", "")
    values = json.loads(found[2])
    # with label smoothing, take the loss without it
    loss = values.get(f"{prefix}nll_loss", values[f"{prefix}loss"])
    return part, int(values[f"{prefix}num_updates"]), float(loss)


@dataclass(frozen=True)
class Training:
    """A training in a working folder; it resumes from its last checkpoint.

    Args:
        output: working folder, with checkpoints and train.log.
        options: options of fairseq-train, except those for folders and the log.
        unit: unit of the printed losses.
        scales: factors from bits per token to that unit, for training and validation.
    """

    output: Path
    options: list[str]
    unit: str = "bits a token"
    scales: tuple[float, float] = (1.0, 1.0)

    @property
    def data(self) -> Path:
        """Folder that fairseq-preprocess wrote."""
        return self.output / "data" / "bin"

    @property
    def checkpoint(self) -> Path:
        """Checkpoint from which training resumes."""
        return self.output / "checkpoints" / "checkpoint_last.pt"

    @property
    def log(self) -> Path:
        """File with fairseq's messages."""
        return self.output / "train.log"

    def progress(self) -> tuple[int, float]:
        """Return the updates done and seconds trained; zeros without a checkpoint."""
        if not self.checkpoint.exists():
            return 0, 0.0
        state = read_checkpoint(self.checkpoint, "--output, last checkpoint")
        updates = state["optimizer_history"][-1]["num_updates"]
        return updates, state["extra_state"]["previous_training_time"]

    def run(self, title: str) -> None:
        """Train up to --max-update, unless that is done already; print the progress."""
        goal = int(option(self.options, "--max-update"))
        updates, _ = self.progress()
        if updates >= goal:
            print(f"\n{title}: {updates} of {goal} updates done, nothing left to do")
            return
        words = [program("fairseq-train"), short(self.data), *self.options]
        words += ["--save-dir", short(self.checkpoint.parent), "--log-format", "json"]
        words += ["--log-interval", str(max(1, goal // 100))]
        announce(f"{title}, {updates} of {goal} updates done", words)
        print(f"fairseq's log: {short(self.log)}", flush=True)
        # without a checkpoint training starts over, and so does the log
        resumes = updates > 0 and self.log.exists()
        start = self.log.stat().st_size if resumes else 0
        started = time.monotonic()
        loss = 0.0
        with (
            child_process(words, self.log, append=resumes) as child,
            self.log.open(encoding="utf-8", errors="replace") as log,
        ):
            log.seek(start)
            rest, ended = "", False
            while not ended:
                time.sleep(0.2)
                ended = child.poll() is not None
                # the last line may still be half written
                *lines, rest = (rest + log.read()).split("\n")
                for part, update, bits in filter(None, map(parse_log_line, lines)):
                    if part == "training":
                        loss = bits * self.scales[0]
                        continue
                    print(
                        f"{100 * update // goal:3} %, {time.monotonic() - started:3.0f} s: "
                        f"training {loss:.3f}, validation {bits * self.scales[1]:.3f} {self.unit}",
                        flush=True,
                    )


def write_page(source: Training, title: str) -> None:
    """Write OUTPUT/page.html, a look inside the trained model."""
    words = [*python_command("inspect"), short(source.checkpoint), "--data", short(source.data)]
    words += ["--log", short(source.log), "--output", short(source.output / "page.html")]
    announce(title, words)
    with child_process(words):
        pass


def run_quickstart(
    steps: Callable[[Path], None],
    description: str,
    folder: Path,
    target: str,
    arguments: list[str] | None = None,
) -> int:
    """Run the command of a quickstart and return its exit status.

    Args:
        steps: runs all steps in the working folder; raises ValueError for problems to fix.
        description: docstring of the script.
        folder: default working folder.
        target: Makefile target that runs the script.
        arguments: command line arguments.
    """
    parser = command_parser(description)
    text = f"working folder ({short(folder)})"
    parser.add_argument("--output", type=Path, default=folder, help=text)
    output = parser.parse_args(arguments).output.resolve()

    def work() -> None:
        make_output_folder(output)
        (output / "checkpoints").mkdir(exist_ok=True)
        steps(output)

    return exit_status(work, f"`make {target}` goes on from the last checkpoint", output)
