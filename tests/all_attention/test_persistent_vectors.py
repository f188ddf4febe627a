"""Persistent vectors, and the feed-forward sublayer that they make by themselves."""

import math

import pytest
import torch

from fairseq_plugins.all_attention.persistent_vectors import PersistentVectors, SoftmaxFeedForward
from tests.gradients import assert_same
from tests.reference.all_attention import softmax_feed_forward


def test_persistent_vectors_start_with_unit_variance():
    vectors = PersistentVectors(1024, 8, 64)
    keys, values = vectors()
    for vector in (*keys, *values):
        # 65,536 draws a head: the standard error of the variance is 0.0055
        assert vector.var().item() == pytest.approx(1, abs=0.03)
        assert vector.mean().item() == pytest.approx(0, abs=0.02)
    assert vectors.keys.std().item() == pytest.approx(1 / math.sqrt(64), rel=0.01)
    assert vectors.values.std().item() == pytest.approx(1 / math.sqrt(1024), rel=0.01)


def test_the_softmax_feed_forward_equals_equation_9():
    layer = SoftmaxFeedForward(6, 4, dropout=0.5).double()
    x = torch.randn(1, 5, 4, dtype=torch.float64, requires_grad=True)
    expected = softmax_feed_forward(layer, x[0])
    assert not torch.allclose(layer(x)[0], expected)
    assert_same(layer.eval()(x)[0], expected, [x, *layer.parameters()])
