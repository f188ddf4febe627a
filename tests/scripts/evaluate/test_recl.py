"""RECL equals its definition, and losses have the context that they should."""

import json
import math
from argparse import Namespace

import numpy as np
import pytest

from scripts._shared.command_line import NamedFile
from scripts.evaluate import recl as measure_recl
from scripts.evaluate._scoring import context_losses, load_model, longest_context
from scripts.evaluate.recl import effective_context, relative_gain
from tests.scripts.evaluate.saved_models import read_split, token_losses


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
def test_gain_equals_loops_over_positions(ratio):
    *short, long = np.random.default_rng(1).exponential(3, (4, 41)).astype(np.float32)
    expected = gain_in_loops(short, long, ratio)
    assert relative_gain(short, long, ratio) == pytest.approx(expected, rel=1e-6)


def test_gain_of_large_losses_and_of_equally_hard_positions():
    gain = relative_gain([np.array([2000.0])], np.array([1999.0]), 1)
    assert gain == pytest.approx(1 - 1 / math.e)
    # of equally hard positions, the first count
    baseline, long = np.array([1.0, 5, 3, 5, 2]), np.array([1.0, 4, 3, 5, 2])
    assert relative_gain([baseline], long, 0.2) == pytest.approx(1 - math.exp(-1))


def losses_that_fall_until(*ends):
    """Return losses that fall by 0.05 per 10 tokens, up to a model's ``ends`` tokens of context."""
    return lambda model, context: np.full(8, 3 - 0.05 * min(context, ends[model]) / 10)


def recl(losses, num_models, *settings, limit=math.inf):
    return effective_context(losses, [limit] * num_models, *settings)


def test_recl_is_where_the_gain_ends():
    losses = losses_that_fall_until(60, 30)
    both = [recl(losses, 2, model, range(10, 91, 10), 0.5, 0.01) for model in range(2)]
    assert [(each["tokens"], each["bound"]) for each in both] == [(60, "exact"), (30, "exact")]
    steps = [(gain["short"], gain["long"]) for gain in both[1]["gains"]]
    assert steps == [(10, 20), (20, 30), (30, 40)]
    assert both[1]["gains"][0]["gain"] == pytest.approx(1 - math.exp(-0.05))
    # a longer context is tried if the gain is as large as the threshold
    losses = losses_that_fall_until(60)
    gain = relative_gain([losses(0, 10)], losses(0, 20), 1)
    assert recl(losses, 1, 0, range(10, 31, 10), 1, gain - 1e-9)["tokens"] == 30
    assert recl(losses, 1, 0, range(10, 31, 10), 1, gain + 1e-9)["tokens"] == 10


def test_the_group_is_the_baseline_for_each():
    def losses(model, context):
        # the second model improves as well, but is never as good as the first
        return np.full(4, (1.0 if model == 0 else 3.0) - 0.001 * context)

    contexts = range(9, 51, 9)
    alone = recl(lambda _, context: losses(1, context), 1, 0, contexts, 1, 5e-3)
    beside = recl(losses, 2, 1, contexts, 1, 5e-3)
    assert (alone["tokens"], alone["bound"]) == (45, "at least")
    assert (beside["tokens"], beside["bound"]) == (9, "at most")


@pytest.mark.parametrize(
    ("end", "step", "longest", "tokens", "bound"),
    [
        # the Transformer of table 8 reads at most 128 tokens, and its losses stay the same beyond
        (128, 100, 900, 128, "exact"),
        (128, 200, 900, 128, "at most"),
        (500, 100, 400, 400, "at least"),
    ],
)
def test_a_model_that_reads_no_farther_has_that_as_its_recl(end, step, longest, tokens, bound):
    losses = losses_that_fall_until(end)
    measured = recl(losses, 1, 0, range(step, longest + 1, step), 1, 0.01, limit=end)
    assert (measured["tokens"], measured["bound"]) == (tokens, bound)


def load_as_recl(folder, name, stride=1):
    """Load a model; return it with the options that recl.py measures it with."""
    options = {"split": "test", "stride": stride, "batch_size": 3, "cpu": True}
    data = folder / ("text" if (folder / "text").exists() else "bin")
    arguments = Namespace(data=data, **options)
    return load_model(NamedFile(name, folder / f"{name}.pt"), arguments), arguments


@pytest.mark.parametrize(
    ("name", "context", "stride", "first", "step"),
    [
        *((name, context, 1, context, 5) for name in ("xl", "aa", "abs") for context in (1, 9)),
        # in a window of 4 tokens, the first has this context and the others have more
        ("xl", 6, 4, 8, 4),
        # a model of fairseq's language_modeling
        ("blocks", 5, 1, 20, 30),
    ],
)
def test_context_losses_equal_a_pass_over_each_window(
    folder, models, saved, name, context, stride, first, step
):
    loaded, arguments = load_as_recl(saved if name == "blocks" else folder, name, stride)
    losses, text = context_losses(loaded, context, arguments), read_split(loaded)
    for begin in range(first, len(text) - stride + 1, step):
        end = begin + stride
        inputs, targets = text[begin - context : end - 1], text[begin - context + 1 : end]
        expected = token_losses(loaded.model, inputs, targets)
        np.testing.assert_allclose(losses[begin:end], expected[-stride:], atol=1e-5)


def test_absolute_positions_limit_the_context(folder, models, saved):
    loaded, _ = load_as_recl(folder, "abs")
    assert longest_context(loaded, 3) == 10
    with pytest.raises(ValueError, match=r"--stride is 13, and .* 12 tokens"):
        longest_context(loaded, 13)
    assert longest_context(load_as_recl(folder, "xl")[0], 13) == math.inf
    blocks, _ = load_as_recl(saved, "blocks")
    assert longest_context(blocks, 1) == blocks.model.max_positions()


def words(folder, *options):
    return [
        *("--data", str(folder / "bin"), "--cpu", "--step", "2", "--max-context", "14"),
        # a threshold that every gain reaches
        *("--threshold", "-1", "--stride", "2", *options),
    ]


def test_the_script_measures_a_group(folder, models, tmp_path):
    checkpoints = f"XL={folder}/xl.pt", f"P={folder}/abs.pt"
    options = words(folder, "--output", str(tmp_path), "--checkpoint", *checkpoints)
    assert measure_recl.main(options) == 0
    result = json.loads((tmp_path / "recl.json").read_text())
    assert result["positions"] == 46
    group = [load_as_recl(folder, name, stride=2) for name in ("xl", "abs")]

    def after_the_longest(number, context):
        model, arguments = group[number]
        arguments.batch_size = 8
        return context_losses(model, min(context, (99, 11)[number]), arguments)[14:]

    for number, name in enumerate(("XL", "P")):
        for ratio in (0.1, 0.5, 1.0):
            settings = number, range(2, 15, 2), ratio, -1
            expected = effective_context(after_the_longest, (math.inf, 11), *settings)
            assert result["models"][name]["recl"][str(ratio)] == expected
    assert (tmp_path / "recl.png").stat().st_size > 5000


def test_contexts_longer_than_the_text_are_refused(folder, models, check_refusal):
    line = words(folder, "--checkpoint", f"{folder}/xl.pt", "--max-tokens", "14")
    check_refusal(measure_recl.main, line, "--max-context is 14 and the text has 14 tokens")
