"""κ and α: projection, initial values, schedule, replacement, gating."""

import pytest
import torch

from fairseq_plugins.weighted_transformer.branch_weights import (
    BranchWeights,
    draw_from_simplex,
    draw_near_uniform,
    project_to_simplex,
)
from tests.weighted_transformer.tiny import assert_on_simplex

CORNERS = [[7.0, 7.0, 7.0, 7.0], [-1.0, -1.0, -1.0], [0.0, 1.0, 0.0], [0.9, 0.4, 0.15, 0.15]]


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0, 1000.0])
def test_projection_gives_the_nearest_point_of_the_simplex(spread):
    """It takes the same from all numbers, and leaves 0 of smaller ones."""
    drawn = [1 / branches + spread * torch.randn(9, branches) for branches in (1, 2, 5, 6)]
    for x in [*(x for vectors in drawn for x in vectors), *map(torch.tensor, CORNERS)]:
        projected = x.clone()
        project_to_simplex(projected)
        assert_on_simplex(projected)
        taken = (x.double() - projected)[projected > 0]
        torch.testing.assert_close(taken, taken[:1].expand_as(taken), rtol=0, atol=1e-6)
        assert (x[projected == 0] <= taken.max() + 1e-6).all()


def test_random_branch_weights_are_uniform_on_the_simplex():
    torch.manual_seed(1)
    drawn = torch.stack([draw_from_simplex(3) for _ in range(4000)])
    assert_on_simplex(*drawn)
    # a coordinate of a uniform point of the triangle exceeds 1/2 with probability 1/4
    assert (drawn > 0.5).float().mean(0).tolist() == pytest.approx([0.25] * 3, abs=0.03)


@pytest.mark.parametrize("branches", [1, 2, 8])
def test_near_uniform_branch_weights_spread_by_two(branches):
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


def test_branch_weights_are_applied_times_their_total():
    weights = BranchWeights(4, total=4)
    torch.testing.assert_close(weights(), 4 * weights.alpha)
    weights = BranchWeights(3, "kappa", parameterization="softmax")
    weights.kappa_logits.data = logits = torch.tensor([3.0, 0.0, 1.0])
    torch.testing.assert_close(weights(), logits.softmax(0))


def test_shaken_weights_are_drawn_anew_in_training_and_equal_outside():
    weights = BranchWeights(4, shake=True)
    torch.manual_seed(1)
    expected = [draw_from_simplex(4) for _ in range(3)]
    torch.manual_seed(1)
    assert all(torch.equal(weights(), drawn) for drawn in expected)
    assert weights.eval()().tolist() == [0.25] * 4
    assert not weights.alpha.requires_grad
    # drawn on their own device: a copy from the CPU would make the host wait for a GPU
    before = torch.random.get_rng_state()
    assert weights.train().to("meta")().device.type == "meta"
    assert torch.equal(torch.random.get_rng_state(), before)


def test_other_weights_replace_the_learned_ones_in_evaluation():
    weights = BranchWeights(4, outside_training="uniform")
    assert weights() is weights.alpha
    assert weights.eval()().tolist() == [0.25] * 4
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        weights = BranchWeights(4, "kappa", outside_training="random")
        assert weights() is weights.kappa
        # drawn only once
        assert torch.equal(weights.eval()(), weights())
        assert_on_simplex(weights())
        assert not torch.allclose(weights(), weights.learned())
        assert set(weights.state_dict()) == {"kappa"}
        drawn.append(weights())
    assert torch.equal(*drawn)


@pytest.mark.parametrize("training", [True, False])
def test_gating_keeps_the_branches_with_the_largest_weights(training):
    weights = BranchWeights(4, top_k=2).train(training)
    weights.alpha.data = torch.tensor([0.1, 0.4, 0.2, 0.3])
    assert weights().tolist() == pytest.approx([0, 0.4, 0, 0.3])
    weights().sum().backward()
    assert weights.alpha.grad.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": "none"}, "`start` is 'none': there are random, near-uniform"),
        ({"top_k": 0}, "`top_k` is 0: it must be from 1 to 4"),
        ({"top_k": 2, "shake": True}, "`top_k` is 2, and `shake` makes all weights equal"),
        ({"top_k": 2, "outside_training": "uniform"}, "`top_k` is 2, and `outside_training` make"),
    ],
)
def test_branch_weights_refuse_impossible_options(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        BranchWeights(4, **options)
