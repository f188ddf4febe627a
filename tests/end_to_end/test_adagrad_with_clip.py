"""The published recipe for characters through fairseq-train: warm-up and plateau."""

import re

import pytest
import torch

from tests.end_to_end.commands import train, train_on_two_workers
from tests.end_to_end.results import EXACT, assert_equal

LEARNING_RATE = 0.07
STEPS = 8
RULE = ("--optimizer", "adagrad_with_clip", "--disable-validation", "--log-interval", 1)
RECIPE = (*RULE, "--lr", LEARNING_RATE, "--lr-scheduler", "fixed", "--warmup-updates", 5)


def last(folder):
    """Weights of the last checkpoint by name, and the sums in the same order."""
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    optimizer = state["last_optimizer_state"]
    names = [name for name in state["model"] if not name.endswith("version")]
    sums = {name: optimizer["state"][i]["sum"] for i, name in enumerate(names)}
    assert len(sums) == len(optimizer["state"]) > 10
    for name, total in sums.items():
        assert total.shape == state["model"][name].shape
    return {name: state["model"][name] for name in names}, sums


def logged(printed):
    """The learning rate after each update from the log, by the number of updates."""
    found = re.findall(r"train_inner \|.* num_updates=(\d+), lr=([\d.e-]+)", printed)
    return {int(updates): float(rate) for updates, rate in found}


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Folder of a run of 8 updates."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(data, folder, *RECIPE, "--max-update", STEPS)
    return folder


def test_a_resumed_run_is_the_uninterrupted_run(data, uninterrupted, tmp_path):
    train(data, tmp_path, *RECIPE, "--max-update", 6)
    train(data, tmp_path, *RECIPE, "--max-update", STEPS)
    weights, sums = last(tmp_path)
    expected_weights, expected_sums = last(uninterrupted)
    assert_equal(weights, expected_weights, **EXACT)
    assert_equal(sums, expected_sums, **EXACT)


def test_the_rate_falls_when_validation_stops_falling(data, tmp_path):
    # epochs of four updates; no loss is a tenth of the best, so each after the first is too high
    plateau = ("--lr-scheduler", "reduce_lr_on_plateau", "--lr-shrink", 0.1, "--lr-patience", 0)
    always = ("--lr-threshold", 0.9, "--tokens-per-sample", 60, "--max-epoch", 4)
    words = ("--optimizer", "adagrad_with_clip", "--lr", LEARNING_RATE, "--log-interval", 1)
    printed = train(data, tmp_path, *words, *plateau, *always, "--warmup-updates", 2)
    # the first epoch ends after the warm-up and sets the best loss, the second divides the rate
    rates = [0.5, 1, 1, 1, *4 * [1], *4 * [0.1], *4 * [0.01]]
    expected = {step: LEARNING_RATE * rate for step, rate in enumerate(rates, start=1)}
    assert logged(printed) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "precision", [["--bf16"], ["--fp16", "--fp16-no-flatten-grads"]], ids=" ".join
)
def test_half_precisions_train(data, uninterrupted, tmp_path, precision):
    train(data, tmp_path, *RECIPE, "--max-update", STEPS, *precision)
    weights, sums = last(tmp_path)
    expected_weights, expected_sums = last(uninterrupted)
    for name, total in sums.items():
        assert total.dtype is torch.float32
        # the sums tell the size of the gradients: a loss scale left in them would be squared here
        few = {"rtol": 0, "atol": 0.1 * float(expected_sums[name].max())}
        torch.testing.assert_close(total, expected_sums[name], **few, msg=name)
    assert_equal(weights, expected_weights, rtol=2**-8, atol=0.03)


@pytest.mark.slow
def test_two_workers_learn_what_one_learns(data, uninterrupted, tmp_path):
    train_on_two_workers(data, tmp_path, *RECIPE, "--max-update", STEPS)
    weights, sums = last(tmp_path)
    expected_weights, expected_sums = last(uninterrupted)
    assert_equal(sums, expected_sums, rtol=1e-4, atol=1e-9)
    assert_equal(weights, expected_weights, rtol=1e-4, atol=1e-6)
