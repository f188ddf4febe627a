"""A layer's cache is cut, reordered and extended in place; older caches do not change."""

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span
from fairseq_plugins.all_attention.attention import GroupedCaches
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates, KeyValueCache
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests.tiny import spread_spans, tiny_model, tiny_transformer_xl, tokens

HEADS, STREAMS, WIDTH = 2, 3, 4


def draw(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (HEADS, STREAMS, length, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@torch.no_grad()
@pytest.mark.parametrize("kept", [0, 1, 5, 40])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_a_cache_holds_the_last_tokens_of_all_that_was_written(kept, length):
    keys, values = draw(60)
    cache = KeyValueCache.of(keys[:, :, :length], values[:, :, :length])
    for start in range(length, 60 - length + 1, length):
        end = start + length
        cache = cache.last(kept).extended(keys[:, :, start:end], values[:, :, start:end])
        first = max(0, start - kept)
        assert cache.length == end - first
        assert torch.equal(cache.keys, keys[:, :, first:end])
        assert torch.equal(cache.values, values[:, :, first:end])
        assert cache.buffers.keys.size(2) <= kept + max(length, kept // 8) + length


@torch.no_grad()
def test_a_cache_that_is_extended_keeps_what_it_had():
    old = KeyValueCache.of(*draw(40)).extended(*draw(1))
    before = old.keys.clone(), old.values.clone()
    room = old.buffers.end - old.end
    assert room > 0
    # if there is room, nothing is copied
    assert old.extended(*draw(room, seed=1)).buffers.keys is old.buffers.keys
    old.extended(*draw(5, seed=2))
    assert torch.equal(old.keys, before[0])
    assert torch.equal(old.values, before[1])


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, 11, 16, 29, 30, 31, 300])
def test_a_full_cache_moves_what_it_has_in_place(length):
    cache = KeyValueCache.of(*draw(240))
    buffers = []
    for _ in range(60):
        cache = cache.last(240).extended(*draw(length))
        buffers.append(cache.buffers.keys)
    assert all(buffer is buffers[-1] for buffer in buffers[-50:])


@torch.no_grad()
def test_a_cache_never_shows_what_a_later_one_has_overwritten():
    cache = KeyValueCache.of(*draw(8))
    cache.last(2).extended(*draw(4))
    with pytest.raises(RuntimeError, match="tokens 0 to 6 of the stream are no longer kept"):
        cache.keys  # noqa: B018
    with pytest.raises(RuntimeError, match="tokens 0 to 6 of the stream are no longer kept"):
        cache.extended(*draw(20))


@pytest.mark.parametrize("length", [0, 2, 4, 7])
@pytest.mark.parametrize("before", [0, 1, 3, 9])
def test_all_kinds_cut_alike(length, before):
    expected = list(range(6))[: max(0, 6 - before)][-length:] if length else []
    keys, values = draw(6)
    cut = KeyValueCache.of(keys, values).last(length, before)
    assert torch.equal(cut.keys, keys[:, :, expected])
    assert torch.equal(cut.values, values[:, :, expected])
    hidden = torch.randn(STREAMS, 6, WIDTH)
    for states in (HiddenStates(hidden), HiddenStates(hidden[:, 4:], earlier=hidden[:, :4])):
        cut = states.last(length, before)
        assert torch.equal(cut.hidden, hidden[:, expected])
        assert cut.length == len(expected)


def test_states_take_the_dtype_they_are_wanted_in():
    like = torch.zeros(1, dtype=torch.float64)
    cache = KeyValueCache.of(*draw(3)).last(2).to(like)
    assert (cache.keys.dtype, cache.values.dtype, cache.length) == (like.dtype, like.dtype, 2)
    assert HiddenStates(torch.zeros(1, 2, 3)).to(like).hidden.dtype == like.dtype


@pytest.mark.parametrize("build", [tiny_transformer_xl, tiny_model])
def test_gradients_do_not_depend_on_how_the_past_was_read(build):
    model, stream = build().double(), tokens(3, 8)
    found = []
    for read in (torch.no_grad, torch.enable_grad):
        recurrence = Recurrence()
        with read():
            model(stream[:, :4], recurrence=recurrence, start=0)
        loss = model(stream[:, 4:], recurrence=recurrence, start=4)[0].square().sum()
        found.append(torch.autograd.grad(loss, [*model.parameters()], materialize_grads=True))
    torch.testing.assert_close(*found)
    recurrence = Recurrence()
    with torch.no_grad():
        model.eval()(stream[:, :4], recurrence=recurrence, start=0)
    with pytest.raises(ValueError, match=r"^`past` holds keys and values, from which `k_proj`"):
        model.train()(stream[:, 4:], recurrence=recurrence, start=4)


def spread_model():
    model = tiny_model(adaptive_span=True, span_ramp=1)
    spread_spans(model)
    return model


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1], [2, 1, 0], [1, 2, 0], [2, 0, 0, 1]])
@pytest.mark.parametrize(
    ("build", "training", "kind"),
    [
        (tiny_transformer_xl, True, HiddenStates),
        (tiny_transformer_xl, False, KeyValueCache),
        (spread_model, False, GroupedCaches),
    ],
)
def test_a_walk_goes_on_in_the_order_that_is_asked_for(build, training, kind, order, monkeypatch):
    monkeypatch.setattr(adaptive_span, "GROUP_COST", 0)
    model, stream, order = build().double().train(training), tokens(3, 8), torch.tensor(order)
    with torch.no_grad():
        recurrence, expected = Recurrence(), Recurrence()
        model(stream[:, :6], recurrence=recurrence, start=0)
        states = next(iter(recurrence.histories.values())).layers
        assert {type(state) for state in states} == {kind}
        assert kind is not GroupedCaches or max(len(state.groups) for state in states) == 2
        recurrence.reorder(order)
        model(stream[order, :6], recurrence=expected, start=0)
        rest = stream[order, 6:]
        scores = [model(rest, recurrence=walk, start=6)[0] for walk in (recurrence, expected)]
    torch.testing.assert_close(*scores)
