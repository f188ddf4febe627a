import math

import numpy as np
import pytest

from scripts.evaluate._effective_context import (
    Contexts,
    check_contexts,
    effective_context,
    hardest_positions,
    relative_gain,
)


def gain_in_loops(short, long, ratio):
    """g_i(c, c') of appendix C, position by position."""
    baseline = []
    for position in range(len(long)):
        best = math.inf
        for losses in short:
            best = min(best, float(losses[position]))
        baseline.append(best)
    hardest = sorted(range(len(long)), key=lambda position: (-baseline[position], position))
    hardest = hardest[: math.ceil(ratio * len(long))]
    of_short = of_long = 0.0
    for position in hardest:
        of_short += min(baseline[position], baseline[position]) / len(hardest)
        of_long += min(baseline[position], float(long[position])) / len(hardest)
    return (math.exp(of_short) - math.exp(of_long)) / math.exp(of_short)


def random_losses(seed, models=3, positions=41):
    return np.random.default_rng(seed).exponential(3, (models, positions)).astype(np.float32)


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 1])
@pytest.mark.parametrize("seed", [1, 2])
def test_gain_is_that_of_the_loops(ratio, seed):
    short, long = random_losses(seed), random_losses(seed + 10)[0]
    expected = gain_in_loops(short, long, ratio)
    assert relative_gain(list(short), long, ratio) == pytest.approx(expected, rel=1e-6)


def test_gain_by_hand():
    short = [np.log([2.0, 8, 16]), np.log([4.0, 4, 32])]
    # baseline 2, 4, 16; of the hardest two thirds, 16 and 4, only 16 becomes better: 2
    long = np.log([1.0, 64, 2])
    assert relative_gain(short, long, 0.5) == pytest.approx(
        1 - math.sqrt(2 * 4) / math.sqrt(16 * 4)
    )


def test_gain_is_a_share_and_none_without_more_context():
    for seed in range(20):
        short, long = random_losses(seed), random_losses(seed + 50)[0]
        assert 0 <= relative_gain(list(short), long, 0.3) < 1
        for losses in short:
            assert relative_gain(list(short), losses, 0.3) == 0


def test_gain_does_not_overflow():
    assert relative_gain([np.array([2000.0])], np.array([1999.0]), 1) == pytest.approx(
        1 - 1 / math.e
    )


def test_hardest_positions_are_the_largest_and_of_equals_the_first():
    baseline = np.array([1.0, 5, 3, 5, 2])
    assert hardest_positions(baseline, 0.2).tolist() == [1]
    assert hardest_positions(baseline, 0.5).tolist() == [1, 2, 3]
    assert hardest_positions(baseline, 1).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("ratio", [0, -0.5, 1.5])
def test_an_impossible_share_is_refused(ratio):
    with pytest.raises(ValueError, match=f"--ratios has {ratio}: it must be above 0 and at most 1"):
        hardest_positions(np.ones(3), ratio)


def test_losses_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="there are no positions to choose from"):
        hardest_positions(np.ones(0), 0.5)
    with pytest.raises(ValueError, match=r"losses of \[2, 3\] positions cannot be compared"):
        relative_gain([np.ones(2)], np.ones(3), 0.5)
    with pytest.raises(ValueError, match="a loss is not finite: look for NaN in the checkpoints"):
        relative_gain([np.ones(2)], np.array([1, np.nan]), 0.5)


@pytest.mark.parametrize(
    ("contexts", "message"),
    [
        (Contexts(0, 100, 900), "--first-context is 0: it must be at least 1"),
        (Contexts(100, 0, 900), "--step is 0: it must be at least 1"),
        (Contexts(100, 100, 199), "--max-context is 199: it must be at least .* plus --step, 200"),
    ],
)
def test_impossible_contexts_are_refused(contexts, message):
    with pytest.raises(ValueError, match=message):
        check_contexts(contexts)


def losses_that_fall_until(*ends, rate=0.05):
    """Models whose loss falls by ``rate`` with every 10 tokens, to ``ends`` tokens of context."""

    def losses(model, context):
        return np.full(8, 3 - rate * min(context, ends[model]) / 10)

    return losses


def test_recl_is_where_the_gain_ends():
    found = [
        effective_context(losses_that_fall_until(60, 30), 2, model, Contexts(10, 10, 90), 0.5, 0.01)
        for model in range(2)
    ]
    assert [each.tokens for each in found] == [60, 30]
    assert [each.bound for each in found] == ["exact", "exact"]
    steps = [(gain.short, gain.long) for gain in found[1].gains]
    assert steps == [(10, 20), (20, 30), (30, 40)]
    assert found[1].gains[0].gain == pytest.approx(1 - math.exp(-0.05))


def test_the_threshold_is_part_of_the_gains_that_go_on():
    losses = losses_that_fall_until(60)
    gain = relative_gain([losses(0, 10)], losses(0, 20), 1)
    assert effective_context(losses, 1, 0, Contexts(10, 10, 30), 1, gain - 1e-9).tokens == 30
    assert effective_context(losses, 1, 0, Contexts(10, 10, 30), 1, gain + 1e-9).tokens == 10


def test_the_group_is_the_baseline_of_each():
    def losses(model, context):
        # the second model improves as well, and is never as good as the first
        return np.full(4, (1.0 if model == 0 else 3.0) - 0.001 * context)

    alone = effective_context(
        lambda _, context: losses(1, context), 1, 0, Contexts(9, 9, 50), 1, 5e-3
    )
    beside = effective_context(losses, 2, 1, Contexts(9, 9, 50), 1, 5e-3)
    assert (alone.tokens, alone.bound) == (45, "at least")
    assert (beside.tokens, beside.bound) == (9, "at most")


@pytest.mark.parametrize(
    ("end", "contexts", "tokens", "bound"),
    [
        # reads on past 128 tokens as if there were none: table 8's Transformer
        (128, Contexts(100, 100, 900), 128, "exact"),
        (128, Contexts(100, 100, 200), 128, "exact"),
        (128, Contexts(200, 100, 900), 128, "at most"),
        (500, Contexts(100, 100, 400), 400, "at least"),
    ],
)
def test_a_model_that_reads_no_farther_has_that_as_its_recl(end, contexts, tokens, bound):
    found = effective_context(losses_that_fall_until(end), 1, 0, contexts, 1, 0.01, limit=end)
    assert (found.tokens, found.bound) == (tokens, bound)
