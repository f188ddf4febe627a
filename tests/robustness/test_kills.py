"""Commands that are killed at random moments and started again end as if never killed.

``pytest tests/robustness/test_kills.py --kills 100`` kills each command a hundred times.
"""

import hashlib
import random
import time

import pytest
import torch

from tests.end_to_end.commands import Command, start_together
from tests.end_to_end.trainings import TRAININGS, logged, read_tensors, training_command

pytestmark = pytest.mark.slow
UPDATES = 15
SAVED_OFTEN = ("--max-update", UPDATES, "--save-interval-updates", 3, "--keep-interval-updates", 2)


def timed(start):
    """Run the commands that ``start`` starts; return the first one's output and the seconds."""
    began = time.monotonic()
    printed = [finish(command) for command in start()]
    return printed[0], time.monotonic() - began


def finish(command):
    status, printed = command.wait()
    assert status == 0, printed[-4000:]
    return printed


def kill_at(commands, seconds):
    """Kill the last command after a number of seconds, then the others, which wait for it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and commands[-1].runs():
        time.sleep(0.002)
    for command in reversed(commands):
        command.kill()
        command.wait()


@pytest.mark.parametrize(
    ("paper", "workers"), [*((paper, 1) for paper in TRAININGS), ("transformer_xl", 2)]
)
def test_a_killed_training_goes_on_as_the_one_that_was_not(
    corpora, tmp_path, paper, workers, request
):
    def start(folder):
        words = training_command(corpora, paper, folder, *SAVED_OFTEN)
        if workers == 1:
            return [Command(*words)]
        return start_together(*words, "--ddp-backend", "legacy_ddp")

    whole = tmp_path / "whole"
    printed, seconds = timed(lambda: start(whole))
    expected = read_tensors(whole / "checkpoint_last.pt")
    draw = random.Random(paper)
    for number in range(request.config.getoption("kills")):
        folder = tmp_path / str(number)
        kill_at(start(folder), draw.uniform(0.1, 1) * seconds)
        # the checkpoints that are left are complete
        left = [read_tensors(path) for path in sorted(folder.glob("checkpoint*.pt"))]
        again, _ = timed(lambda folder=folder: start(folder))
        assert not (left and "resuming cold" in again)
        losses = logged(printed)
        for place, values in logged(again).items():
            assert values == losses[place], place
        found = read_tensors(folder / "checkpoint_last.pt")
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def digests(folder):
    """Return a digest of each file except logs; the folder's name in a file does not count."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(
            path.read_bytes().replace(str(folder).encode(), b"")
        ).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".log", ".json")
    }


@pytest.mark.parametrize(
    "name", ["prepare.text", "prepare.translation", "prepare.number_names", "convert.average"]
)
def test_a_killed_command_started_again_writes_the_same_bytes(
    corpora, trained, tmp_path, name, request
):
    text, pairs = corpora["text"].parent, corpora["pairs"].parent
    last = trained("transformer_xl") / "checkpoint_last.pt"
    parts = [word for part in ("train", "valid", "test") for word in (f"--{part}", pairs / part)]
    options = {
        "prepare.text": ("--input", text, "--unit", "words"),
        "prepare.translation": (
            *("--source-lang", "en", "--target-lang", "de", *parts),
            *("--bpe-size", 40, "--workers", 1),
        ),
        "prepare.number_names": ("--train", 2000, "--valid", 20, "--test", 20),
        "convert.average": (last, last.with_name("checkpoint_1_4.pt")),
    }[name]

    def words(output):
        file = output.with_name("average.pt") if name == "convert.average" else output
        return (f"scripts.{name}", *options, "--output", file)

    whole = tmp_path / "whole" / "output"
    whole.parent.mkdir()
    _, seconds = timed(lambda: [Command(*words(whole))])
    draw = random.Random(name)
    for number in range(request.config.getoption("kills")):
        output = tmp_path / str(number) / "output"
        output.parent.mkdir()
        kill_at([Command(*words(output))], draw.uniform(0.1, 1) * seconds)
        # a command that had ended before the kill may say that its output exists
        _, printed = Command(*words(output)).wait()
        assert digests(output.parent) == digests(whole.parent), printed[-2000:]
