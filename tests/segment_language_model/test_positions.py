"""Encodings of distances and of places."""

import pytest
import torch

from fairseq_plugins.segment_language_model.attention_blocks import Clamped
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedRelativePositions,
    SinusoidalRelativePositions,
)

WIDTH, LIKE = 8, torch.empty(0)


@pytest.mark.parametrize(
    "positions",
    [
        SinusoidalRelativePositions(WIDTH, 3),
        SinusoidalRelativePositions(WIDTH, 3, torch.nn.Dropout(0.5)).eval(),
        Distances(3),
        LearnedRelativePositions(9, WIDTH, 3),
    ],
)
def test_distances_beyond_the_clamp_are_left_out(positions):
    nearer, clamp, farther = (positions(farthest, LIKE) for farthest in (2, 3, 7))
    assert (len(nearer), len(clamp)) == (4, 5)
    assert isinstance(farther, Clamped)
    assert torch.equal(farther.rows, clamp)
    assert torch.equal(clamp[1:], nearer)


def test_dropout_acts_on_each_distance_beyond_the_clamp():
    dropout = torch.nn.Dropout(0.5)
    torch.manual_seed(1)
    encoding = SinusoidalRelativePositions(WIDTH, 3, dropout)(7, LIKE)
    whole = SinusoidalRelativePositions(WIDTH)(3, LIKE)
    torch.manual_seed(1)
    expected = dropout(torch.cat([whole[:1].expand(4, -1), whole]).double())
    torch.testing.assert_close(encoding, expected.float())
    assert not torch.equal(encoding[0], encoding[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_far_positions_apart(dtype):
    encode = SinusoidalRelativePositions(WIDTH)
    half, exact = (encode(590, LIKE.to(kind)) for kind in (dtype, torch.float64))
    assert half.dtype == dtype
    torch.testing.assert_close(half.double(), exact, atol=0.01, rtol=0.01)
