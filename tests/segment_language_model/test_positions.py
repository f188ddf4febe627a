"""Encodings of distances and of places."""

import pytest
import torch

from fairseq_plugins.segment_language_model.positions import SinusoidalRelativePositions

WIDTH, LIKE = 8, torch.empty(0)


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
