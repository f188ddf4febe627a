"""The published recipe for characters through fairseq-train: warm-up, plateau, final phase."""

import re
import shutil

import pytest
import torch

from tests.end_to_end.commands import train, train_on_two_workers
from tests.end_to_end.results import EXACT, assert_equal

LEARNING_RATE = 0.07
STEPS = 8
RULE = ("--optimizer", "adagrad_with_clip", "--disable-validation", "--log-interval", 1)
RECIPE = (*RULE, "--lr", LEARNING_RATE, "--lr-scheduler", "fixed", "--warmup-updates", 5)


def last(folder):
    """Weights of the last checkpoint by name, the sums in the same order, and the options."""
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    optimizer = state["last_optimizer_state"]
    names = [name for name in state["model"] if not name.endswith("version")]
    sums = {name: optimizer["state"][i]["sum"] for i, name in enumerate(names)}
    assert len(sums) == len(optimizer["state"]) > 10
    for name, total in sums.items():
        assert total.shape == state["model"][name].shape
    (group,) = optimizer["param_groups"]
    return {name: state["model"][name] for name in names}, sums, group


def logged(printed):
    """The learning rate after each update from the log, by the number of updates."""
    found = re.findall(r"train_inner \|.* num_updates=(\d+), lr=([\d.e-]+)", printed)
    return {int(updates): float(rate) for updates, rate in found}


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """Folder of a run of 8 updates, and its log."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, train(data, folder, *RECIPE, "--max-update", STEPS)


@pytest.fixture(scope="module")
def interrupted(data, tmp_path_factory):
    """Folder of a run of 6 updates."""
    folder = tmp_path_factory.mktemp("interrupted")
    train(data, folder, *RECIPE, "--max-update", 6)
    return folder


def test_the_learning_rate_rises_linearly(uninterrupted):
    _, printed = uninterrupted
    # fairseq logs the rate of the update that comes next: the first one's is a fifth
    rising = {step: LEARNING_RATE * min(1, (step + 1) / 5) for step in range(1, STEPS + 1)}
    assert logged(printed) == pytest.approx(rising, rel=1e-5)


def test_a_resumed_run_is_the_uninterrupted_run(data, uninterrupted, interrupted, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "resumed")
    train(data, folder, *RECIPE, "--max-update", STEPS)
    weights, sums, _ = last(folder)
    expected_weights, expected_sums, _ = last(uninterrupted[0])
    assert_equal(weights, expected_weights, **EXACT)
    assert_equal(sums, expected_sums, **EXACT)


def test_the_final_phase_goes_on_with_the_sums_at_a_tenth_of_the_rate(data, interrupted, tmp_path):
    folder = shutil.copytree(interrupted, tmp_path / "final")
    # options that come later win: the same command but for --lr and --max-update
    printed = train(data, folder, *RECIPE, "--lr", LEARNING_RATE / 10, "--max-update", 7)
    assert "(epoch 1 @ 6 updates)" in printed
    assert logged(printed) == pytest.approx({7: LEARNING_RATE / 10})
    _, sums_before, _ = last(interrupted)
    _, sums, group = last(folder)
    assert group["lr"] == pytest.approx(LEARNING_RATE / 10)
    for name, total in sums.items():
        # the squares of one update's gradient were added
        assert (total >= sums_before[name]).all()
        assert total.sum() > sums_before[name].sum() > 0


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
    weights, sums, _ = last(tmp_path)
    expected_weights, expected_sums, _ = last(uninterrupted[0])
    for name, total in sums.items():
        assert total.dtype is torch.float32
        # the sums tell the size of the gradients: a loss scale left in them would be squared here
        few = {"rtol": 0, "atol": 0.1 * float(expected_sums[name].max())}
        torch.testing.assert_close(total, expected_sums[name], **few, msg=name)
    assert_equal(weights, expected_weights, rtol=2**-8, atol=0.03)


@pytest.mark.slow
def test_two_workers_learn_what_one_learns(data, uninterrupted, tmp_path):
    train_on_two_workers(data, tmp_path, *RECIPE, "--max-update", STEPS)
    weights, sums, _ = last(tmp_path)
    expected_weights, expected_sums, _ = last(uninterrupted[0])
    assert_equal(sums, expected_sums, rtol=1e-4, atol=1e-9)
    assert_equal(weights, expected_weights, rtol=1e-4, atol=1e-6)
