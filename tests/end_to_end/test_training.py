"""fairseq-train: how validation, resuming, workers and precision affect a training.

A resumed training ends with the result of an unbroken one, and says so if it is already complete.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from tests.end_to_end.commands import environment, train
from tests.end_to_end.trainings import EXACT, assert_equal, logged, parameters

STEPS = ("--max-update", 8)
LOGGED = ("--log-format", "json", "--log-interval", 1, "--disable-validation")
FP16 = ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 4)
ROUNDED = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Return the folder of a run of 8 updates without validation, and its log."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "log").write_text(train(data, folder, *STEPS, *LOGGED))
    return folder


def test_a_resumed_run_with_validations_is_the_uninterrupted_run(data, uninterrupted, tmp_path):
    train(data, tmp_path, "--max-update", 3)
    printed = train(data, tmp_path, *STEPS, "--validate-interval-updates", 2)
    assert "resuming with recurrence, after 24 tokens of each stream" in printed
    assert_equal(parameters(tmp_path), parameters(uninterrupted), **EXACT)


@pytest.mark.slow
def test_a_folder_that_another_training_writes_into_is_refused(data, tmp_path):
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    printed = train(data, tmp_path, "--max-update", 1, fails=True)
    os.close(held)
    assert re.search(r"^error: --save-dir is .*another training", printed, re.MULTILINE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--shuffle-sentences", ", sentences shuffled with seed 1, segments of 8"),
        ("--segment-jitter 3", ", lengths of deviation 3 drawn with seed 1, segments of 8"),
    ],
)
def test_a_resumed_run_goes_on_with_what_its_epoch_drew(
    data, uninterrupted, tmp_path, option, message
):
    drawn = (*option.split(), "--disable-validation")
    printed = train(data, tmp_path / "whole", *STEPS, *drawn)
    assert message in printed
    train(data, tmp_path / "parts", "--max-update", 3, *drawn)
    train(data, tmp_path / "parts", *STEPS, *drawn)
    whole = parameters(tmp_path / "whole")
    assert_equal(parameters(tmp_path / "parts"), whole, **EXACT)
    with pytest.raises(AssertionError):
        assert_equal(parameters(uninterrupted), whole, rtol=1e-4, atol=1e-5)
    if "--segment-jitter" in option:
        # both workers draw the same
        train(data, tmp_path / "two", *STEPS, *drawn, workers=2)
        assert_equal(parameters(tmp_path / "two"), whole, **ROUNDED)


def test_accumulated_gradients_follow_the_streams(data, tmp_path):
    printed = train(data, tmp_path, "--max-update", 2, "--update-freq", 2, "--disable-validation")
    assert "a batch was skipped" not in printed
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert state["extra_state"]["train_iterator"]["recurrence"]["end"] == 2 * 2 * 8


def test_the_memory_that_two_workers_saved_is_gone_on_with(data, uninterrupted, tmp_path):
    begun, other, cold = (tmp_path / name for name in ("begun", "other", "cold"))
    printed = train(data, begun, "--max-update", 3, "--batch-split", 2, workers=2)
    assert "in 4 streams, segments of 8 tokens; worker 1 of 2 has 2 streams" in printed
    shutil.copytree(begun, other)
    shutil.copytree(begun, cold)
    for folder, workers in ((begun, 1), (other, 2)):
        printed = train(data, folder, *STEPS, workers=workers)
        assert "resuming with recurrence, after 24 tokens of each stream" in printed
        assert_equal(parameters(folder), parameters(uninterrupted), **ROUNDED)
    # without the memory, training ends with other weights
    path = cold / "checkpoint_last.pt"
    state = torch.load(path, weights_only=True)
    del state["extra_state"]["train_iterator"]["recurrence"]
    torch.save(state, path)
    assert "resuming cold" in train(data, cold, *STEPS)
    with pytest.raises(AssertionError):
        assert_equal(parameters(cold), parameters(uninterrupted), **ROUNDED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("criterion", "rest"),
    [
        # the last segment of some streams is empty, which adaptive softmax does not accept
        (
            "--adaptive-input --adaptive-input-cutoff 8 --adaptive-softmax-cutoff 8 "
            "--tie-adaptive-weights",
            0,
        ),
        # or has padding on only one worker
        ("--half-loss", 2),
    ],
)
def test_two_workers_end_an_epoch_of_uneven_streams(data, tmp_path, criterion, rest):
    tokens = sum(len(line.split()) + 1 for line in (data.parent / "train.txt").open())
    # all streams of the first worker are longer than some of the second
    streams = next(n for n in (4, 6, 8, 10, 12) if n // 2 <= tokens % n)
    layout = ("--batch-size", streams // 2, "--tokens-per-sample", tokens // streams - rest)
    options = ("--criterion", "segment_loss", *criterion.split(), *layout, "--max-epoch", 1)
    train(data, tmp_path, *options, workers=2)
    for name, weight in parameters(tmp_path).items():
        # fairseq's adaptive input has a buffer that it never fills
        assert weight.isfinite().all() or name.endswith("_float_tensor")


@pytest.mark.parametrize(
    "precision",
    [
        # fairseq mixes precisions on GPUs only: this shows that the option is harmless on a CPU;
        # tests/gpu has tests of mixed precision
        ("--amp",),
        # test_all_attention.py tests these without --batch-split
        ("--bf16", "--batch-split", 3),
        (*FP16, "--batch-split", 3),
    ],
)
def test_other_precisions_train(data, uninterrupted, tmp_path, precision):
    train(data, tmp_path, *STEPS, "--disable-validation", *precision)
    found = parameters(tmp_path)
    assert all(weight.isfinite().all() for weight in found.values())
    assert_equal(found, parameters(uninterrupted), rtol=0.1, atol=0.05)
    moved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert moved["optimizer_history"][-1]["num_updates"] == 8


def test_a_batch_in_parts_is_learned_from_as_a_whole(data, uninterrupted, tmp_path):
    printed = train(data, tmp_path, "--max-update", 3, "--batch-split", 3, *LOGGED)
    # resume with another --batch-split
    printed += train(data, tmp_path, *STEPS, "--batch-split", 2, *LOGGED)
    assert_equal(parameters(tmp_path), parameters(uninterrupted), **ROUNDED)
    assert [updates for _, updates in logged(printed)] == list(range(1, 9))
    assert logged(printed) == logged((uninterrupted / "log").read_text())


@pytest.mark.slow
def test_a_checkpoint_holds_plain_containers(transformer_xl):
    # load it in a process that has not imported fairseq or this package
    script = "import sys, torch; torch.load(sys.argv[1], weights_only=True); print('loaded')"
    words = [sys.executable, "-c", script, transformer_xl]
    done = subprocess.run(words, capture_output=True, text=True, env=environment())
    assert done.stdout.strip() == "loaded", done.stderr


# epochs of four updates
SHORT = ("--tokens-per-sample", 60)


def test_patience_is_what_it_was(data, tmp_path):
    def epochs(most, patience):
        # with learning rate 0, nothing improves
        words = (*SHORT, "--lr", 0, "--max-epoch", most, "--patience", patience)
        printed = train(data, tmp_path, *words)
        return list(map(int, re.findall(r"end of epoch (\d+) \(", printed))), printed

    assert epochs(3, 3)[0] == [1, 2, 3]
    assert epochs(9, 3)[0] == [4]
    # then the training is complete, until --patience is larger
    trained, printed = epochs(9, 3)
    assert trained == []
    assert "has not improved in 3 validations, and --patience is 3; give more" in printed
    assert epochs(9, 5)[0] == [5, 6]


def test_a_plateau_scheduler_goes_on(data, tmp_path):
    def rates(folder, most):
        # improvements at this rate are too small to count
        scheduler = "--lr 1e-7 --lr-scheduler reduce_lr_on_plateau --lr-patience 1 --lr-shrink 0.5"
        printed = train(data, folder, *SHORT, *scheduler.split(), "--max-epoch", most)
        return re.findall(r"^.*\| epoch \d+ \|.*\| lr (\S+)", printed, re.MULTILINE)

    expected = rates(tmp_path / "whole", 6)
    assert len(expected) == 6
    assert len(set(expected)) == 3
    # at the break, the rate has shrunk once, and one epoch since has brought no improvement
    assert rates(tmp_path / "broken", 4) + rates(tmp_path / "broken", 6) == expected
    assert_equal(parameters(tmp_path / "broken"), parameters(tmp_path / "whole"), **EXACT)


def test_a_complete_training_says_why_it_ends(data, tmp_path):
    train(data, tmp_path, *SHORT, "--max-epoch", 1, "--disable-validation")
    before = parameters(tmp_path)
    for options, reason in (
        (("--max-update", 2), r"has \d+ updates, and --max-update is 2"),
        (("--max-epoch", 2, "--stop-time-hours", 1e-9), r"took 0\.00 hours, and --stop-time-hours"),
    ):
        printed = train(data, tmp_path, *SHORT, *options, "--disable-validation")
        assert re.search(
            rf"nothing is left to train: .* in --save-dir {tmp_path} {reason}", printed
        )
        assert_equal(parameters(tmp_path), before, **EXACT)
