"""κ and α: projection, initial values, schedule, replacement, gating."""

import pytest
import torch

from fairseq_plugins.weighted_transformer.branch_weights import (
    BranchSchedule,
    BranchWeights,
    draw_from_simplex,
    draw_near_uniform,
    project_to_simplex,
)
from tests.reference.weighted_transformer import nearest_on_simplex
from tests.weighted_transformer.tiny import assert_on_simplex

SCHEDULE = BranchSchedule(factor=1.0, warmup=400)


# in the last vector, the last two numbers equal the amount that is subtracted from all
CORNERS = [
    [[5.0, 0.0, 0.0], [-1.0, -1.0, -1.0], [0.5, 0.5, -7.0], [0.0, 1.0, 0.0], [2.0, 2.0, 0.0]],
    [[7.0, 7.0, 7.0, 7.0], [0.25, 0.25, 0.5, 0.0], [0.9, 0.4, 0.15, 0.15]],
]


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0, 1000.0])
def test_projection_is_the_nearest_point_of_the_simplex(spread):
    drawn = [1 / branches + spread * torch.randn(9, branches) for branches in (1, 2, 5, 6)]
    for x in (x for vectors in (*drawn, *map(torch.tensor, CORNERS)) for x in vectors):
        found = x.clone()
        project_to_simplex(found)
        torch.testing.assert_close(found, nearest_on_simplex(x.double()).float())
        assert_on_simplex(found)


def test_the_start_is_uniform_on_the_simplex():
    torch.manual_seed(1)
    drawn = torch.stack([draw_from_simplex(3) for _ in range(4000)])
    assert_on_simplex(*drawn)
    # a coordinate of a uniform point of the triangle exceeds 1/2 with probability 1/4
    assert (drawn > 0.5).float().mean(0).tolist() == pytest.approx([0.25] * 3, abs=0.03)


@pytest.mark.parametrize("branches", [1, 2, 8])
def test_a_start_near_uniform_spreads_by_two_in_an_order_by_the_seed(branches):
    torch.manual_seed(1)
    drawn = [draw_near_uniform(branches) for _ in range(9)]
    for x in drawn:
        assert_on_simplex(x)
        assert (x.max() / x.min()).item() == pytest.approx(2 if branches > 1 else 1)
        # neighbors differ by equal factors
        rising = x.sort().values
        factors = rising[1:] / rising[:-1]
        torch.testing.assert_close(factors, factors[:1].expand_as(factors))
    assert len({tuple(x.tolist()) for x in drawn}) > 1 or branches == 1
    torch.manual_seed(1)
    assert torch.equal(draw_near_uniform(branches), drawn[0])


def test_weights_are_multiplied_where_they_are_applied_alone():
    weights = BranchWeights(4, SCHEDULE, start="near-uniform", applied_sum=4)
    for applied, learned in zip(weights(), weights.learned(), strict=True):
        torch.testing.assert_close(applied, 4 * learned)
        assert_on_simplex(learned)
    weights.outside_training = "uniform"
    assert [x.tolist() for x in weights.eval()()] == [[1.0] * 4] * 2


def test_shaken_weights_are_drawn_anew_in_training_and_equal_outside():
    weights = BranchWeights(4, SCHEDULE, shake=True)
    torch.manual_seed(1)
    expected = [draw_from_simplex(4) for _ in range(6)]
    torch.manual_seed(1)
    drawn = [x for _ in range(3) for x in weights()]
    assert all(map(torch.equal, drawn, expected))
    assert [x.tolist() for x in weights.eval()()] == [[0.25] * 4] * 2
    assert weights.schedule is None
    # drawn on their own device: a copy from the CPU would make the host wait for a GPU
    before = torch.random.get_rng_state()
    assert {x.device.type for x in weights.train().to("meta")()} == {"meta"}
    assert torch.equal(torch.random.get_rng_state(), before)


def test_softmax_of_the_logits():
    weights = BranchWeights(3, SCHEDULE, "softmax")
    logits = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([3.0, 0.0, 1.0])
    weights.kappa_logits.data, weights.alpha_logits.data = logits
    for found, x in zip(weights(), logits, strict=True):
        torch.testing.assert_close(found, x.softmax(0))


def test_the_learning_rate_is_that_of_the_paper_until_weights_are_frozen():
    schedule = BranchSchedule(0.3, 400, freeze_after=200)
    rates = [schedule.learning_rate(update) for update in (1, 200, 400, 10_000)]
    expected = [0.3 / 8000, 0.3 / 40, 0.3 / 20, 0.3 / 100]
    assert rates == pytest.approx(expected, rel=1e-12)
    assert [schedule.frozen(update) for update in (1, 200, 201, 10_000)] == [False] * 2 + [True] * 2
    assert BranchSchedule(1.0, 400, freeze_after=0).frozen(1)
    assert not SCHEDULE.frozen(10**9)


def test_others_replace_the_learned_ones_outside_of_training():
    weights = BranchWeights(4, SCHEDULE, outside_training="uniform")
    assert weights()[0] is weights.kappa
    assert [x.tolist() for x in weights.eval()()] == [[0.25] * 4] * 2
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        weights = BranchWeights(4, SCHEDULE, outside_training="random")
        assert weights()[1] is weights.alpha
        # drawn only once
        for x, again, learned in zip(weights.eval()(), weights(), weights.learned(), strict=True):
            assert torch.equal(x, again)
            assert_on_simplex(x)
            assert not torch.allclose(x, learned)
        assert set(weights.state_dict()) == {"kappa", "alpha"}
        found.append(weights())
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kinds", [("kappa", "alpha"), ("kappa",)])
def test_gating_keeps_the_branches_with_the_largest_alpha_or_else_kappa(training, kinds):
    weights = BranchWeights(4, SCHEDULE, top_k=2, kinds=kinds).train(training)
    chosen = getattr(weights, kinds[-1])
    chosen.data = torch.tensor([0.1, 0.4, 0.2, 0.3])
    *others, gated = weights()
    assert gated.tolist() == pytest.approx([0, 0.4, 0, 0.3])
    assert others == [] or others[0] is weights.kappa
    gated.sum().backward()
    assert chosen.grad.tolist() == [0, 1, 0, 1]
