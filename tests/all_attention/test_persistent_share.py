"""The share of attention that persistent vectors get, logged in validation."""

import copy
import math

import pytest
import torch
from fairseq.logging import metrics

from tests.tiny import spread_spans, tiny_model, tokens

STREAMS, LENGTH, PAD = 3, 6, 1
LEARNED = {"attention_span": 16, "adaptive_span": True, "span_ramp": 4, "span_epsilon": 0.01}


def logged(model, *texts):
    """Return the values that one pass over a validation set logs, in order."""
    with metrics.aggregate(new_root=True) as found, torch.no_grad():
        for text in texts:
            model(src_tokens=text)
    return {name: x for name, x in found.get_smoothed_values().items() if name[0] != "_"}


def attention_of_each_token(model, text):
    """Return the shares (B, T) of each layer, from the inputs of its output projection.

    With persistent values of 1 and others of 0, these inputs are the share itself.
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
@pytest.mark.parametrize("options", [{}, {**LEARNED, "span_epsilon": 0.0}])
def test_validation_logs_the_share_of_each_layer(options, padding):
    model = tiny_model(**options).eval()
    if options:
        spread_spans(model)
    text = tokens(STREAMS, LENGTH)
    text[0, LENGTH - padding :] = PAD
    shares = attention_of_each_token(model, text)
    expected = [100 * share[text.ne(PAD)].mean().item() for share in shares]
    found = logged(model, text)
    assert list(found) == [f"persistent_share_{number}" for number in range(1, len(shares) + 1)]
    assert list(found.values()) == pytest.approx(expected, abs=0.06)
    assert 0 < min(expected) < max(expected) < 100
    assert logged(model.train(), text) == {}


def test_batches_count_by_their_tokens():
    model = tiny_model().eval()
    one, two = tokens(1, 4), tokens(3, 8, seed=3)
    separate = [logged(model, text)["persistent_share_1"] for text in (one, two)]
    together = (separate[0] * 4 + separate[1] * 24) / 28
    assert logged(model, one, two)["persistent_share_1"] == pytest.approx(together, abs=0.1)


@pytest.mark.parametrize(
    "options", [{"persistent_variant": "attn-split"}, {"persistent_vectors": 0}]
)
def test_nothing_is_logged_where_the_context_has_a_softmax_of_its_own(options):
    assert logged(tiny_model(**options).eval(), tokens(STREAMS, LENGTH)) == {}


def test_an_error_leaves_nothing_behind():
    model = tiny_model().eval()
    breaking = model.decoder.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    text = tokens(1, 6)
    with metrics.aggregate(new_root=True) as found, pytest.raises(ZeroDivisionError):
        model(text)
    assert found.get_smoothed_values() == {}
    breaking.remove()
    assert logged(copy.deepcopy(model), text) == logged(model, text) != {}
