"""RECL equals its definition, and losses have the context that they should."""

import json
import math
from argparse import Namespace
from unittest.mock import Mock

import numpy as np
import pytest

from fairseq_plugins import load
from fairseq_plugins.python_interface.language_model import LanguageModel
from scripts._shared.command_line import NamedFile
from scripts.evaluate import recl as measure_recl
from scripts.evaluate._effective_context import ContextLosses, effective_context, relative_gain
from tests.scripts.evaluate.saved_models import token_losses


def gain_in_loops(short, long, ratio):
    """Compute g_i(c, c') of appendix C position by position."""
    baseline = [min(float(losses[position]) for losses in short) for position in range(len(long))]
    hardest = sorted(range(len(long)), key=lambda position: (-baseline[position], position))
    hardest = hardest[: math.ceil(ratio * len(long))]
    short_loss = long_loss = 0.0
    for position in hardest:
        short_loss += baseline[position] / len(hardest)
        long_loss += min(baseline[position], float(long[position])) / len(hardest)
    return (math.exp(short_loss) - math.exp(long_loss)) / math.exp(short_loss)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 1])
@pytest.mark.parametrize("seed", [1, 2])
def test_gain_equals_loops_over_positions(ratio, seed):
    *short, long = np.random.default_rng(seed).exponential(3, (4, 41)).astype(np.float32)
    expected = gain_in_loops(short, long, ratio)
    assert relative_gain(short, long, ratio) == pytest.approx(expected, rel=1e-6)


def test_gain_for_large_losses_and_equally_hard_positions():
    gain = relative_gain([np.array([2000.0])], np.array([1999.0]), 1)
    assert gain == pytest.approx(1 - 1 / math.e)
    # of equally hard positions, the first count
    baseline, long = np.array([1.0, 5, 3, 5, 2]), np.array([1.0, 4, 3, 5, 2])
    assert relative_gain([baseline], long, 0.2) == pytest.approx(1 - math.exp(-1))


def losses_that_fall_until(*ends):
    """Return losses that fall by 0.05 per 10 tokens, up to a model's ``ends`` tokens of context."""
    return lambda model, context: np.full(8, 3 - 0.05 * min(context, ends[model]) / 10)


def test_recl_is_where_the_gain_ends():
    both = [
        effective_context(losses_that_fall_until(60, 30), 2, model, 10, 90, 0.5, 0.01)
        for model in range(2)
    ]
    assert [(recl["tokens"], recl["bound"]) for recl in both] == [(60, "exact"), (30, "exact")]
    steps = [(gain["short"], gain["long"]) for gain in both[1]["gains"]]
    assert steps == [(10, 20), (20, 30), (30, 40)]
    assert both[1]["gains"][0]["gain"] == pytest.approx(1 - math.exp(-0.05))
    # a longer context is tried if the gain is as large as the threshold
    losses = losses_that_fall_until(60)
    gain = relative_gain([losses(0, 10)], losses(0, 20), 1)
    assert effective_context(losses, 1, 0, 10, 30, 1, gain - 1e-9)["tokens"] == 30
    assert effective_context(losses, 1, 0, 10, 30, 1, gain + 1e-9)["tokens"] == 10


def test_the_group_is_the_baseline_for_each():
    def losses(model, context):
        # the second model improves as well, but is never as good as the first
        return np.full(4, (1.0 if model == 0 else 3.0) - 0.001 * context)

    alone = effective_context(lambda _, context: losses(1, context), 1, 0, 9, 50, 1, 5e-3)
    beside = effective_context(losses, 2, 1, 9, 50, 1, 5e-3)
    assert (alone["tokens"], alone["bound"]) == (45, "at least")
    assert (beside["tokens"], beside["bound"]) == (9, "at most")


@pytest.mark.parametrize(
    ("end", "step", "longest", "tokens", "bound"),
    [
        # the Transformer of table 8 reads at most 128 tokens, and its losses stay the same beyond
        (128, 100, 900, 128, "exact"),
        (128, 100, 200, 128, "exact"),
        (128, 200, 900, 128, "at most"),
        (500, 100, 400, 400, "at least"),
    ],
)
def test_a_model_that_reads_no_farther_has_that_as_its_recl(end, step, longest, tokens, bound):
    losses = losses_that_fall_until(end)
    recl = effective_context(losses, 1, 0, step, longest, 1, 0.01, limit=end)
    assert (recl["tokens"], recl["bound"]) == (tokens, bound)


def measure_losses(folder, *names, stride=1, batch_size=4):
    checkpoints = [NamedFile(name, folder / name) for name in names]
    windows = {"stride": stride, "batch_size": batch_size}
    options = Namespace(data=folder / "bin", split="test", cpu=True, **windows)
    return ContextLosses(checkpoints, 60, options)


@pytest.mark.parametrize(
    ("name", "context", "stride", "first", "step"),
    [
        *((name, context, 1, context, 5) for name in ("xl", "aa", "abs") for context in (1, 9)),
        # in a window of 4 tokens, the first has this context and the others have more
        ("xl", 6, 4, 8, 4),
    ],
)
def test_a_token_has_its_context_in_sight(folder, text, models, name, context, stride, first, step):
    losses = measure_losses(folder, f"{name}.pt", stride=stride, batch_size=3)(0, context)
    model = load(folder / f"{name}.pt", folder / "bin", mem_len=0, same_length=False).model
    for begin in range(first, len(text) - stride + 1, step):
        end = begin + stride
        inputs, targets = text[begin - context : end - 1], text[begin - context + 1 : end]
        expected = token_losses(model, inputs, targets)
        np.testing.assert_allclose(losses[begin:end], expected[-stride:], atol=1e-5)


def test_absolute_positions_limit_the_context(folder, models):
    losses = measure_losses(folder, "abs.pt", stride=3)
    assert losses.limits == [10]
    np.testing.assert_array_equal(losses(0, 100), losses(0, 10))
    with pytest.raises(ValueError, match=r"--stride is 13: abs.pt was trained on .* 12 tokens"):
        measure_losses(folder, "abs.pt", stride=13)
    assert measure_losses(folder, "xl.pt", stride=13).limits == [None]


def test_losses_are_measured_once(folder, models, monkeypatch):
    losses, score = measure_losses(folder, "xl.pt"), Mock(return_value=np.zeros(60))
    monkeypatch.setattr(LanguageModel, "score_split", score)
    for context in (3, 3, 4, 3):
        losses(0, context)
    assert score.call_count == 2


def words(folder, *options):
    return [
        *("--data", str(folder / "bin"), "--cpu", "--step", "2", "--max-context", "8"),
        *("--threshold", "0.0001", "--stride", "2", *options),
    ]


def test_the_script_measures_a_group(folder, models, tmp_path):
    checkpoints = f"XL={folder}/xl.pt", f"P={folder}/abs.pt"
    options = words(folder, "--output", str(tmp_path), "--checkpoint", *checkpoints)
    assert measure_recl.main(options) == 0
    result = json.loads((tmp_path / "recl.json").read_text())
    assert result["positions"] == 52
    losses = measure_losses(folder, "xl.pt", "abs.pt", stride=2, batch_size=8)

    def after_the_longest(model, context):
        return losses(model, context)[8:]

    for number, name in enumerate(["XL", "P"]):
        for ratio in (0.1, 0.5, 1.0):
            expected = effective_context(after_the_longest, 2, number, 2, 8, ratio, 0.0001)
            assert result["models"][name]["recl"][str(ratio)] == expected
    assert (tmp_path / "recl.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stride", "0"], "--stride is 0: "),
        (["--threshold", "0"], "--threshold is 0.0: "),
        (["--step", "5"], "--max-context is 8: "),
        (["--max-tokens", "8"], "--max-context is 8 and the text has 8 tokens"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(folder, models, refused, options, message):
    common = words(folder, "--checkpoint", f"{folder}/xl.pt")
    refused(measure_recl.main, [*common, *options], message)
