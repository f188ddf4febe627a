"""fairseq-train: how validation, resuming, workers and precision affect a training.

A resumed training ends with the result of an unbroken one.
"""

import shutil

import pytest
import torch

from tests.end_to_end.commands import run, train
from tests.end_to_end.trainings import (
    EXACT,
    TRAININGS,
    assert_equal,
    logged,
    parameters,
    read_tensors,
    training_command,
)

STEPS = ("--max-update", 8)
LOGGED = ("--log-format", "json", "--log-interval", 1, "--disable-validation")
ROUNDED = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Return the folder of a run of 8 updates without validation, and its log."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    (folder / "log").write_text(train(data, folder, *STEPS, *LOGGED))
    return folder


@pytest.mark.parametrize("paper", TRAININGS)
def test_a_resumed_run_is_the_unbroken_one(corpora, trained, tmp_path, paper):
    """Weights, optimizer, schedules, pasts, and the order of batches within a later epoch."""
    checkpoint = min(trained(paper).glob("checkpoint_2_*.pt"))
    start = ("--restore-file", checkpoint, "--save-interval-updates", 4)
    run(*training_command(corpora, paper, tmp_path, *start, "--max-update", 20))
    expected = read_tensors(trained(paper) / "checkpoint_last.pt")
    assert_equal(read_tensors(tmp_path / "checkpoint_last.pt"), expected, **EXACT)


def test_a_resumed_run_reads_its_epoch_in_the_same_order(data, uninterrupted, tmp_path):
    shuffled = ("--shuffle-sentences", "--disable-validation")
    train(data, tmp_path / "whole", *STEPS, *shuffled)
    for updates in (3, 8):
        train(data, tmp_path / "parts", "--max-update", updates, *shuffled)
    whole = parameters(tmp_path / "whole")
    assert_equal(parameters(tmp_path / "parts"), whole, **EXACT)
    with pytest.raises(AssertionError):
        assert_equal(parameters(uninterrupted), whole, rtol=1e-4, atol=1e-5)
    # both workers read the same order
    train(data, tmp_path / "two", *STEPS, *shuffled, workers=2)
    assert_equal(parameters(tmp_path / "two"), whole, **ROUNDED)


def test_one_or_two_workers_resume_pasts_saved_by_two(data, uninterrupted, tmp_path):
    begun, other, cold = (tmp_path / name for name in ("begun", "other", "cold"))
    train(data, begun, "--max-update", 3, "--batch-split", 2, workers=2)
    shutil.copytree(begun, other)
    shutil.copytree(begun, cold)
    for folder, workers in ((begun, 1), (other, 2)):
        # validations change nothing
        train(data, folder, *STEPS, "--validate-interval-updates", 2, workers=workers)
        assert_equal(parameters(folder), parameters(uninterrupted), **ROUNDED)
    # without the pasts, training ends with other weights
    path = cold / "checkpoint_last.pt"
    state = torch.load(path, weights_only=True)
    del state["extra_state"]["train_iterator"]["pasts"]
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
    "precision", ["--amp", "--bf16", "--fp16 --fp16-no-flatten-grads --fp16-init-scale 4"]
)
def test_other_precisions_train(data, uninterrupted, tmp_path, precision):
    printed = train(data, tmp_path, *STEPS, *LOGGED, "--batch-split", 3, *precision.split())
    losses = [
        [float(values["loss"]) for values in logged(log).values()]
        for log in (printed, (uninterrupted / "log").read_text())
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    # the losses fall by more than that
    assert losses[1][-1] < 0.95 * losses[1][0]
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert state["optimizer_history"][-1]["num_updates"] == 8


def test_a_batch_in_parts_trains_as_the_whole_does(data, uninterrupted, tmp_path):
    printed = train(data, tmp_path, "--max-update", 3, "--batch-split", 3, *LOGGED)
    # resume with another --batch-split
    printed += train(data, tmp_path, *STEPS, "--batch-split", 2, *LOGGED)
    assert_equal(parameters(tmp_path), parameters(uninterrupted), **ROUNDED)
    assert [updates for _, updates in logged(printed)] == list(range(1, 9))
    assert logged(printed) == logged((uninterrupted / "log").read_text())
