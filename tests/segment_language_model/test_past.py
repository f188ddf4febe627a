"""A past is a value: whoever holds one can go on from it, any number of times, in any mode."""

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fairseq_plugins.all_attention import adaptive_span
from fairseq_plugins.segment_language_model.past import KeyValues, Past
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


@pytest.mark.parametrize("most", [1, 5, 40])
@pytest.mark.parametrize("length", [1, 3, 8])
def test_key_values_are_those_of_the_last_tokens(most, length):
    keys, values = draw_heads(60)
    past = KeyValues.wrap(keys[:, :, :length], values[:, :, :length])
    for start in range(length, 60 - length + 1, length):
        end = start + length
        past = past.last(most).extended(keys[:, :, start:end], values[:, :, start:end])
        first = max(0, start - most)
        assert torch.equal(past.keys, keys[:, :, first:end])
        assert torch.equal(past.values, values[:, :, first:end])
        assert past.buffers.keys.size(2) <= most + most // 4 + 2 * length


def in_turn(function, items):
    return [function(item) for item in items]


def in_threads(function, items):
    barrier = threading.Barrier(len(items))

    def at_once(item):
        barrier.wait()
        return function(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(at_once, items))


@pytest.mark.parametrize("at_once", [in_turn, in_threads])
@pytest.mark.parametrize("length", [4, 8, 40])
def test_continuations_do_not_overwrite_each_other(at_once, length):
    start, (token, _) = draw_heads(length), draw_heads(1, seed=1)
    # from 8 tokens on, the buffers have room behind the new token
    past = KeyValues.wrap(*start).extended(token, token)
    begun = torch.cat([start[0], token], dim=2)
    for _ in range(20):
        drawn = [draw_heads(1, seed)[0] for seed in range(2, 6)]
        continued = at_once(lambda new, past=past: past.extended(new, new), drawn)
        for new, longer in zip(drawn, continued, strict=True):
            assert torch.equal(longer.keys, torch.cat([begun, new], dim=2))
        past, begun = continued[0], continued[0].keys.clone()


def test_key_values_are_rarely_copied():
    past, buffers = KeyValues.wrap(*draw_heads(240)), set()
    for _ in range(240):
        past = past.last(240).extended(*draw_heads(1))
        buffers.add(past.buffers)
    assert len(buffers) <= 5


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


def test_a_network_rarely_copies_what_it_keeps():
    network, past, buffers = build("TransformerXL").eval(), None, set()
    with torch.no_grad():
        for token in draw(STREAMS, 48).split(1, dim=1):
            _, past = network(token, past)
            buffers.add(past.layers[0].buffers)
    assert len(buffers) <= 24


def pieces(*sizes):
    return draw(STREAMS, sum(sizes)).split(sizes, dim=1)


def through_file(past):
    file = io.BytesIO()
    torch.save(past, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES = {
    "itself": lambda past: past,
    "file": through_file,
    "deepcopy": copy.deepcopy,
    "pickle": lambda past: pickle.loads(pickle.dumps(past)),
    "copy": copy.copy,
}


@each_network
@each_mode
@pytest.mark.parametrize("kind", COPIES)
def test_whoever_holds_a_past_or_a_copy_goes_on_from_it(name, mode, kind):
    training, grad = MODES[mode]
    network = build(name).train(training)
    start, one, other, rest, more = pieces(4, 1, 2, 3, 1)
    with grad():
        pasts = {(start,): network(start)[1]}
        # each goes on from a past that others went on from, or will go on from
        for *before, last in (
            (start, one),
            (start, other),
            (start, one, rest),
            (start, other, more),
            (start, rest),
            (start, one, rest, more),
            (start, one, other),
        ):
            past = COPIES[kind](pasts[tuple(before)])
            assert isinstance(past, Past)
            y, pasts[(*before, last)] = network(last, past)
            whole, read = read_segments(network, (*before, last))
            torch.testing.assert_close(y, whole[:, -last.size(1) :])
            assert past.num_tokens + last.size(1) == read.num_tokens


@each_network
@each_mode
def test_a_past_stays_when_the_caller_changes_his_input(name, mode):
    training, grad = MODES[mode]
    network, (text, rest) = build(name).train(training), pieces(6, 3)
    with grad():
        expected, _ = read_segments(network, (text, rest))
        _, past = network(text)
        text.zero_()
        y, _ = network(rest, past)
    torch.testing.assert_close(y, expected[:, 6:])


def test_a_past_of_inference_mode_goes_on_outside_it():
    # the second segment's buffers have room for the third
    network, text = build("TransformerXL").eval(), pieces(8, 1, 1)
    with torch.no_grad():
        expected, _ = read_segments(network, text)
        with torch.inference_mode():
            _, past = read_segments(network, text[:2])
        y, _ = network(text[2], past)
    torch.testing.assert_close(y, expected[:, 9:])


@each_network
def test_training_goes_on_from_a_past_of_inference_mode(name):
    network, (text, rest) = build(name), pieces(6, 3)
    gradients = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            _, past = network(text)
        loss = network(rest, past)[0].square().sum()
        gradients.append(torch.autograd.grad(loss, [*network.parameters()]))
    torch.testing.assert_close(*gradients)


def test_keys_and_values_stay_in_the_precision_of_autocast():
    network, text = build("TransformerXL").float().eval(), pieces(8, 1, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, past = read_segments(network, [segment.float() for segment in text])
    assert {layer.keys.dtype for layer in past.layers} == {torch.bfloat16}


@each_network
def test_training_refuses_a_past_of_keys_and_values(name):
    network, (text, rest) = build(name).eval(), pieces(5, 3)
    with torch.no_grad():
        _, past = network(text)
    with pytest.raises(ValueError, match=r"^`past` holds keys and values, .*; stay in that mode"):
        network.train()(rest, past)


@each_network
@each_mode
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [0], [1], [1, 1, 0], [0, 0]])
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
    numbers = [leaf for leaf in tree_leaves(cast.positions) if isinstance(leaf, torch.Tensor)]
    assert {leaf.dtype for leaf in numbers if leaf.is_floating_point()} <= {dtype}
