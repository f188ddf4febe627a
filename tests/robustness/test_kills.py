"""Commands that are killed and started again end as if never killed.

``pytest tests/robustness/test_kills.py -m slow --kills 50`` kills each command fifty times.
"""

import os
import random
import signal
import time

import pytest
import torch

from tests.end_to_end.commands import run, start
from tests.end_to_end.trainings import TRAININGS, read_tensors, training_command

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
        actual = read_tensors(folder / "checkpoint_last.pt")
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def contents(folder):
    """Return the content of each file except logs, without the folder's name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().replace(str(folder).encode(), b"")
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".log", ".json")
    }


@pytest.mark.parametrize("name", ["prepare.text", "convert.average"])
def test_a_killed_command_started_again_writes_the_same_files(
    corpora, trained, tmp_path, name, request
):
    last = trained("transformer_xl") / "checkpoint_last.pt"

    def words(folder):
        folder.mkdir()
        if name == "prepare.text":
            options = ("--input", corpora["text"].parent, "--unit", "words")
            return ("scripts.prepare.text", *options, "--output", folder / "output")
        both = (last, last.with_name("checkpoint_1_4.pt"))
        return ("scripts.convert.average", *both, "--output", folder / "average.pt")

    whole, draw = tmp_path / "whole", random.Random(name)
    run(*words(whole))
    for number in range(request.config.getoption("kills")):
        folder = tmp_path / str(number)
        command = words(folder)
        kill_while_it_writes(command, folder, draw)
        if contents(folder) != contents(whole):
            run(*command)
        assert contents(folder) == contents(whole)
