"""Commands that are killed and started again end as if never killed.

``pytest tests/robustness/test_kills.py -m slow --kills 50`` kills each command fifty times.
"""

import os
import random
import signal
import time

import pytest

from tests.end_to_end.commands import run, start
from tests.end_to_end.trainings import (
    EXACT,
    TRAININGS,
    assert_equal,
    read_tensors,
    training_command,
)

pytestmark = pytest.mark.slow
SAVED_OFTEN = ("--max-update", 15, "--save-interval-updates", 3, "--keep-interval-updates", 2)


def kill_while_it_writes(words, folder, draw):
    """Kill a command, with its children, when some of its files are in a folder, or it has ended.

    How many files, and for how long the command runs on, are random.
    """
    command, files = start(*words), draw.randint(1, 3)
    while command.poll() is None and len(list(folder.rglob("*"))) < files:
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.05))
    if command.poll() is None:
        os.killpg(command.pid, signal.SIGKILL)
    command.communicate()


@pytest.mark.parametrize("paper", TRAININGS)
def test_a_killed_training_ends_as_one_that_was_not(corpora, tmp_path, paper, request):
    whole = tmp_path / "whole"
    run(*training_command(corpora, paper, whole, *SAVED_OFTEN))
    expected, draw = read_tensors(whole / "checkpoint_last.pt"), random.Random(paper)
    for number in range(request.config.getoption("kills")):
        folder = tmp_path / str(number)
        words = training_command(corpora, paper, folder, *SAVED_OFTEN)
        kill_while_it_writes(words, folder, draw)
        # the checkpoints that are left are complete
        left = [read_tensors(path) for path in sorted(folder.glob("checkpoint*.pt"))]
        assert "resuming cold" not in run(*words) or not left
        assert_equal(read_tensors(folder / "checkpoint_last.pt"), expected, **EXACT)


def contents(folder):
    """Return the content of each file except logs, without the folder's name."""
    return {
        path.relative_to(folder): path.read_bytes().replace(str(folder).encode(), b"")
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".log", ".json")
    }


@pytest.mark.parametrize("name", ["prepare.text", "convert.average"])
def test_a_killed_command_started_again_writes_the_same_files(
    corpora, trained, tmp_path, name, request
):
    last = trained("transformer_xl") / "checkpoint_last.pt"
    words = {
        "prepare.text": ("--input", corpora["text"].parent, "--unit", "words"),
        "convert.average": (last, last.with_name("checkpoint_1_4.pt")),
    }[name]
    whole, draw = tmp_path / "whole", random.Random(name)
    for folder in (whole, *(tmp_path / str(n) for n in range(request.config.getoption("kills")))):
        folder.mkdir()
        command = (f"scripts.{name}", *words, "--output", folder / "output")
        if folder != whole:
            kill_while_it_writes(command, folder, draw)
        if folder == whole or contents(folder) != contents(whole):
            run(*command)
        assert contents(folder) == contents(whole)
