"""Code that the quickstarts share: print a command and run it."""

from collections.abc import Callable
from pathlib import Path

from scripts._shared.checkpoints import read_checkpoint
from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import format_command, program, run_child, short


def run(title: str, words: list[str], log: Path | None = None, text: str = "") -> str:
    """Print the title of a step and its command, and run it with an input ``text``.

    With a log, what the command prints is written into the log and returned.
    """
    before = f"echo {text.strip()!r} | " if text else ""
    print(f"\n{title}\n$ {before}{format_command(words)}", flush=True)
    run_child(words, log, text)
    return log.read_text(encoding="utf-8") if log else ""


def progress(checkpoint: Path) -> tuple[int, float]:
    """Return the updates and the seconds of training that a checkpoint records."""
    state = read_checkpoint(checkpoint, "--output, last checkpoint")
    updates = state["optimizer_history"][-1]["num_updates"]
    return updates, state["extra_state"]["previous_training_time"]


def train(words: list[str], checkpoints: Path, duration: str) -> tuple[int, float]:
    """Train up to --max-update, unless that is done; return the updates and seconds."""
    goal, last = int(words[words.index("--max-update") + 1]), checkpoints / "checkpoint_last.pt"
    # fairseq would train for one more update
    if last.exists() and progress(last)[0] >= goal:
        print(f"\ntraining: {goal} of {goal} updates done, nothing left to do")
    else:
        run(
            f"training: {duration}",
            [program("fairseq-train"), *words, "--save-dir", short(checkpoints)],
        )
    return progress(last)


def run_quickstart(
    steps: Callable[[Path], None],
    description: str,
    folder: Path,
    target: str,
    arguments: list[str] | None = None,
) -> int:
    """Run the command of a quickstart, ``make TARGET``; return the exit status.

    ``steps`` runs all steps in the working folder, by default ``folder``; ``description`` is the
    module's docstring.
    """
    parser = command_parser(description)
    text = f"working folder ({short(folder)})"
    parser.add_argument("--output", type=Path, default=folder, help=text)
    output = parser.parse_args(arguments).output.resolve()

    def work() -> None:
        output.mkdir(parents=True, exist_ok=True)
        steps(output)

    return exit_status(work, f"`make {target}` goes on from the last checkpoint", output)
