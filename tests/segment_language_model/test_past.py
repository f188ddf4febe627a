"""A past is a value: whoever holds one can go on from it, any number of times, in any mode."""

import copy
import io
import pickle

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span
from fairseq_plugins.all_attention.attention import GroupedKeyValues
from fairseq_plugins.segment_language_model.past import HiddenStates, KeyValues, Past
from tests.segment_language_model.networks import (
    BUILDERS,
    NETWORKS,
    STREAMS,
    build,
    draw,
    read_segments,
)

HEADS, WIDTH = 2, 4
each_network = pytest.mark.parametrize("name", NETWORKS)


def draw_heads(length, seed=0):
    """Draw keys and values (H, B, T, d_h)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (HEADS, STREAMS, length, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def assert_holds(past, keys, values):
    assert past.length == keys.size(2)
    assert torch.equal(past.keys, keys)
    assert torch.equal(past.values, values)


@pytest.mark.parametrize("most", [1, 5, 40])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_key_values_are_those_of_the_last_tokens(most, length):
    keys, values = draw_heads(60)
    past = KeyValues.wrap(keys[:, :, :length], values[:, :, :length])
    for start in range(length, 60 - length + 1, length):
        end = start + length
        past = past.last(most).extended(keys[:, :, start:end], values[:, :, start:end])
        first = max(0, start - most)
        assert_holds(past, keys[:, :, first:end], values[:, :, first:end])
        assert past.buffers.keys.size(2) <= most + most // 4 + 2 * length


def test_key_values_are_rarely_copied():
    past, buffers = KeyValues.wrap(*draw_heads(240)), set()
    for _ in range(240):
        past = past.last(240).extended(*draw_heads(1))
        buffers.add(past.buffers)
    assert len(buffers) <= 5


def test_key_values_go_on_twice_without_changing_each_other():
    text, one, other, rest = (draw_heads(length, seed=length) for length in (9, 1, 2, 3))
    past = KeyValues.wrap(*text).extended(*one)
    first, second = past.extended(*other), past.extended(*rest)
    third, fourth = first.extended(*rest), past.last(4).extended(*one)
    for extended, parts in (
        (past, (text, one)),
        (first, (text, one, other)),
        (second, (text, one, rest)),
        (third, (text, one, other, rest)),
    ):
        assert_holds(extended, *(torch.cat(halves, dim=2) for halves in zip(*parts, strict=True)))
    whole = (torch.cat(halves, dim=2) for halves in zip(text, one, one, strict=True))
    assert_holds(fourth, *(x[:, :, -5:] for x in whole))


@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_each_kind_of_past_is_cut_reordered_and_cast(length):
    order, last = torch.tensor([1, 0, 1]), slice(max(0, 6 - length), 6)
    keys, values = draw_heads(6)
    expected = keys[:, order, last].double(), values[:, order, last].double()
    past = KeyValues.wrap(keys, values)
    for each in (past, GroupedKeyValues((past, past.last(3)))):
        changed = each.last(length).select(order).to(torch.float64)
        assert (changed.length, changed.streams) == (min(6, length), 3)
        assert_holds(getattr(changed, "groups", [changed])[0], *expected)
    hidden = torch.randn(STREAMS, 6, WIDTH)
    for parts in ((hidden,), hidden.split([1, 3, 2], dim=1)):
        changed = HiddenStates(parts).last(length).select(order).to(torch.float64)
        assert (changed.length, changed.streams) == (min(6, length), 3)
        assert torch.equal(changed.hidden, hidden[order, last].double())


def test_hidden_states_are_detached_and_share_the_earlier_ones():
    first, second = (torch.randn(STREAMS, 3, WIDTH, requires_grad=True) for _ in range(2))
    past = HiddenStates(()).extended(first)
    longer = past.extended(second)
    assert not longer.hidden.requires_grad
    assert longer.parts[0].data_ptr() == first.data_ptr()
    assert (past.length, longer.length) == (3, 6)


# the pasts of whole networks

MODES = {
    "training": (True, torch.enable_grad),
    "evaluation": (False, torch.enable_grad),
    "no_grad": (False, torch.no_grad),
    "inference_mode": (False, torch.inference_mode),
}
each_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def _separate_groups(monkeypatch):
    """Let heads with different spans be computed apart."""
    monkeypatch.setattr(adaptive_span, "GROUP_COST", 0)


def pieces(*sizes):
    return draw(STREAMS, sum(sizes)).split(sizes, dim=1)


@each_network
@each_mode
def test_a_past_goes_on_twice(name, mode):
    training, grad = MODES[mode]
    network = build(name).train(training)
    text, one, other, rest, more = pieces(4, 1, 2, 3, 1)
    with grad():
        _, past = network(text)
        y_one, after_one = network(one, past)
        y_other, after_other = network(other, past)
        y_rest, after_rest = network(rest, after_one)
        actual = [
            torch.cat([y_one, y_rest], dim=1),
            torch.cat([y_other, read_segments(network, (more, rest), after_other)[0]], dim=1),
            # the oldest past, after newer ones went on
            read_segments(network, (rest, one), past)[0],
            network(more, after_rest)[0],
            network(other, after_one)[0],
        ]
        expected = [
            read_segments(network, (text, *parts))[0][:, -one_result.size(1) :]
            for parts, one_result in zip(
                [(one, rest), (other, more, rest), (rest, one), (one, rest, more), (one, other)],
                actual,
                strict=True,
            )
        ]
    torch.testing.assert_close(actual, expected)


@each_network
def test_training_refuses_a_past_of_keys_and_values(name):
    network, (text, rest) = build(name).eval(), pieces(5, 3)
    with torch.no_grad():
        _, past = network(text)
    with pytest.raises(ValueError, match=r"^`past` holds keys and values, .*; stay in that mode"):
        network.train()(rest, past)


def through_file(past):
    file = io.BytesIO()
    torch.save(past, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {
    "file": through_file,
    "deepcopy": copy.deepcopy,
    "pickle": lambda past: pickle.loads(pickle.dumps(past)),
    "copy": copy.copy,
}


@each_network
@pytest.mark.parametrize("mode", ["training", "no_grad"])
@pytest.mark.parametrize("kind", COPIES)
def test_a_copied_past_goes_on_by_itself(name, mode, kind):
    training, grad = MODES[mode]
    network = build(name).train(training)
    text, one, other, rest = pieces(4, 1, 2, 3)
    with grad():
        # a past that has room for more
        _, past = read_segments(network, (text, one))
        copied = COPIES[kind](past)
        assert isinstance(copied, Past)
        assert copied.num_tokens == 5
        y, _ = read_segments(network, (other, rest), past)
        from_copy, _ = read_segments(network, (rest, other), copied)
        expected, _ = read_segments(network, (text, one, rest, other))
        assert torch.equal(read_segments(network, (other, rest), COPIES[kind](past))[0], y)
    torch.testing.assert_close(from_copy, expected[:, 5:])


@each_network
@each_mode
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1], [1, 1, 0], [0, 0]])
def test_a_past_goes_on_with_reordered_streams(name, mode, order):
    training, grad = MODES[mode]
    network, order = build(name).train(training), torch.tensor(order)
    text, one, rest = pieces(6, 1, 3)
    with grad():
        _, past = read_segments(network, (text, one))
        y, _ = network(rest[order], past.select(order))
        expected, _ = network(rest, past)
    torch.testing.assert_close(y, expected[order])


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("mode", ["training", "no_grad"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_past_goes_on_in_another_dtype(name, mode, dtype):
    training, grad = MODES[mode]
    network, (text, rest, more) = build(name).train(training), pieces(6, 3, 1)
    with grad():
        _, past = network(text)
        expected, _ = read_segments(network, (rest, more), past)
        network.to(dtype)
        cast = past.to(dtype)
        actual, _ = read_segments(network, (rest.to(dtype), more.to(dtype)), cast)
        # without `to`, each layer casts its past
        uncast, _ = read_segments(network, (rest.to(dtype), more.to(dtype)), past)
        assert torch.equal(uncast, actual)
    tolerance = 1e-4 if dtype == torch.float32 else 0.25
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    for layer in cast.layers:
        assert layer.to(dtype).length == layer.length
