"""Commands that are killed and started again end as if never killed.

``pytest tests/robustness/test_kills.py -m slow --kills 50`` kills each command fifty times.
"""

import multiprocessing
import os
import random
import signal
import time

import pytest
import torch

from tests.end_to_end.commands import call, run, start
from tests.end_to_end.trainings import (
    EXACT,
    TRAININGS,
    assert_equal,
    read_tensors,
    training_command,
)
from tests.scripts.prepare.prepared import contents

pytestmark = pytest.mark.slow
SAVED_OFTEN = ("--max-update", 15, "--save-interval-updates", 3, "--keep-interval-updates", 2)


def count_files(folder):
    # unlike rglob, os.walk passes over folders that are renamed meanwhile
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


def kill_while_it_writes(words, folder, draw):
    """Kill a command, with its children, when some of its files are in a folder, or it has ended.

    How many files, and for how long the command runs on, are random.
    """
    command, files = start(*words), draw.randint(1, 3)
    while command.poll() is None and count_files(folder) < files:
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


def kill_in_a_write(words, share):
    """Call a command, as in a process of its own, that is killed when a share of a file is written.

    Return whether it was killed there.
    """
    save = torch.save

    def save_a_part(state, path):
        save(state, path)
        os.truncate(path, int(share * os.path.getsize(path)))
        os.kill(os.getpid(), signal.SIGKILL)

    def work():
        torch.save = save_a_part
        call(*words)

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


def test_a_killed_preparation_started_again_writes_the_same_files(corpora, tmp_path, request):
    words = (
        "scripts.prepare.__main__",
        "text",
        "--input",
        corpora["text"].parent,
        "--unit",
        "words",
    )
    whole, draw = tmp_path / "whole", random.Random("prepare.text")
    run(*words, "--output", whole)
    for number in range(request.config.getoption("kills")):
        folder = tmp_path / str(number)
        output = folder / "out"
        # beside the output, in a folder that becomes it
        kill_while_it_writes((*words, "--output", output), folder, draw)
        run(*words, "--output", output)
        assert contents(output) == contents(whole)
        assert list(folder.iterdir()) == [output]


def test_a_killed_average_leaves_no_file_of_its_name_and_starts_again(trained, tmp_path, request):
    last = trained("transformer_xl") / "checkpoint_last.pt"
    words = ("scripts.convert.average", last, last.with_name("checkpoint_1_4.pt"), "--output")
    draw, kills = random.Random("convert.average"), request.config.getoption("kills")
    # torch writes the name of a file into it
    whole, *outputs = (tmp_path / str(number) / "mean.pt" for number in range(kills + 1))
    whole.parent.mkdir()
    run(*words, whole)
    for output in outputs:
        output.parent.mkdir()
        assert kill_in_a_write((*words, output), draw.random())
        assert not output.exists()
        run(*words, output)
        assert output.read_bytes() == whole.read_bytes()
        assert list(output.parent.iterdir()) == [output]
