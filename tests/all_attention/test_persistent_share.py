"""What validation logs of the attention that persistent vectors get."""

import math

import pytest
import torch
from fairseq.logging import metrics

from tests.tiny import tiny_model, tokens

STREAMS, LENGTH, PAD = 3, 6, 1


def logged(model, text):
    with metrics.aggregate(new_root=True) as found, torch.no_grad():
        model(text)
    return {key: value for key, value in found.get_smoothed_values().items() if "share" in key}


def attention_of_each_token(model, text):
    """Shares (B, T) of each layer, from what passes through it.

    With persistent values of 1 and others of 0, what is attended to is the share itself.
    """
    shares = []
    for layer in model.decoder.layers:
        layer.self_attn.v_proj.weight.data.zero_()
        values = layer.self_attn.persistent.values.data
        values.fill_(1 / math.sqrt(values.size(1)))
        layer.self_attn.out_proj.register_forward_pre_hook(
            lambda _, inputs: shares.append(inputs[0].mean(-1))
        )
    with torch.no_grad():
        model(text)
    return list(shares)


@pytest.mark.parametrize("padding", [0, 2])
def test_validation_logs_the_share_of_each_layer(padding):
    model = tiny_model().eval()
    text = tokens(STREAMS, LENGTH)
    text[0, LENGTH - padding :] = PAD
    shares = attention_of_each_token(model, text)
    expected = [100 * share[text.ne(PAD)].mean().item() for share in shares]
    found = logged(model, text)
    assert list(found) == [f"persistent_share_{number}" for number in range(1, len(shares) + 1)]
    assert list(found.values()) == pytest.approx(expected, abs=0.06)
    assert 0 < min(expected) < max(expected) < 100


def test_batches_count_by_their_tokens():
    model = tiny_model().eval()
    one, two = tokens(1, 4), tokens(3, 8, seed=3)
    separate = [logged(model, text)["persistent_share_1"] for text in (one, two)]
    with metrics.aggregate(new_root=True) as found, torch.no_grad():
        model(one)
        model(two)
    together = (separate[0] * 4 + separate[1] * 24) / 28
    assert found["persistent_share_1"].avg == pytest.approx(together, abs=0.06)


@pytest.mark.parametrize(
    "options", [{"persistent_variant": "attn-split"}, {"persistent_vectors": 0}]
)
def test_nothing_is_logged_where_the_context_has_a_softmax_of_its_own(options):
    assert logged(tiny_model(**options).eval(), tokens(STREAMS, LENGTH)) == {}


def test_nothing_is_logged_in_training():
    assert logged(tiny_model().train(), tokens(STREAMS, LENGTH)) == {}
