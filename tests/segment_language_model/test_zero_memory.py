"""--zero-memory: streams start with a recurrence of zero vectors, which tokens attend to."""

import pytest
import torch

from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests.gradients import assert_same
from tests.tiny import scores_by_segment, tiny_model, tiny_transformer_xl, tokens

MODES = [torch.no_grad, torch.enable_grad]
# the layers' norms map zero vectors to something else where they come first
BUILD = {
    "all-attention": lambda **o: tiny_model(**o),
    "all-attention-short": lambda **o: tiny_model(mem_len=4, **o),
    "adaptive-span": lambda **o: tiny_model(
        adaptive_span=True, span_ramp=2, span_init=0.3, span_epsilon=0.1, **o
    ),
    "adaptive-span-groups": lambda **o: tiny_model(adaptive_span=True, span_ramp=2, **o),
    "transformer-xl": lambda **o: tiny_transformer_xl(mem_len=5, **o),
    "pre-norm": lambda **o: tiny_transformer_xl(
        mem_len=5, decoder_normalize_before=True, same_length=True, **o
    ),
    "transformer-xl-same-length": lambda **o: tiny_transformer_xl(
        mem_len=5, same_length=True, clamp_len=3, untie_r=True, **o
    ),
    "shaw": lambda **o: tiny_transformer_xl(mem_len=5, positions="shaw", **o),
}
# of the others a token sees as much whatever the segments
DEPENDS_ON_SEGMENTS = {"all-attention-short", "transformer-xl", "shaw"}


def build(name, **options):
    """A model with --zero-memory and the same one without."""
    models = []
    for zero in (True, False):
        model = BUILD[name](zero_memory=zero, **options).double()
        with torch.no_grad():
            # zero vectors have keys and values of their own where a norm has a bias
            for layer in model.decoder.layers:
                layer.self_attn_layer_norm.bias.copy_(torch.linspace(-1, 1, 16))
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    return models


def zeros(model, streams):
    """A recurrence of zero hidden states, as if restored from a checkpoint."""
    length, recurrence = model.decoder.context.mem_len, Recurrence()
    hidden = torch.zeros(streams, length, 16, dtype=torch.float64)
    state = {"layers": [hidden] * len(model.decoder.layers), "end": 0, "mem_len": length}
    recurrence.load_state_dict(state, 0, 1)
    return recurrence


def read(model, stream, length, recurrence, mode=torch.no_grad):
    with mode():
        parts = [
            model(stream[:, start : start + length], recurrence=recurrence, start=start)[0]
            for start in range(0, stream.size(1), length)
        ]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BUILD)
def test_every_segment_equals_those_after_zero_hidden_states(name, mode):
    with_zeros, without = build(name)
    stream = tokens(2, 20)
    for length in (3, 20):
        expected = read(without, stream, length, zeros(without, 2), mode)
        torch.testing.assert_close(scores_by_segment(with_zeros, stream, length, mode), expected)
    empty = scores_by_segment(without, stream, 3, mode)
    found = scores_by_segment(with_zeros, stream, 3, mode)
    assert (found[:, 0] - empty[:, 0]).abs().max() > 0.01


@pytest.mark.parametrize("name", BUILD)
def test_gradients_equal_those_after_zero_hidden_states(name):
    with_zeros, without = build(name)
    # both with the weights of the first
    weights, stream = dict(with_zeros.named_parameters()), tokens(2, 4)
    outputs = [
        torch.func.functional_call(
            model, weights, (stream,), {"recurrence": recurrence, "start": 0}
        )[0]
        for model, recurrence in ((with_zeros, Recurrence()), (without, zeros(without, 2)))
    ]
    assert_same(*outputs, list(weights.values()))


@pytest.mark.parametrize("name", BUILD)
def test_a_segment_without_a_place_starts_with_zeros_too(name):
    model, _ = build(name)
    stream = tokens(2, 7)
    for mode in MODES:
        with mode():
            alone = model(stream)[0]
        torch.testing.assert_close(alone, scores_by_segment(model, stream, 7, mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(BUILD.keys() - DEPENDS_ON_SEGMENTS))
def test_the_segments_length_makes_no_difference(name, mode):
    model, _ = build(name)
    stream = tokens(2, 20)
    whole = scores_by_segment(model, stream, 20, mode)
    for length in (1, 7):
        torch.testing.assert_close(scores_by_segment(model, stream, length, mode), whole)


@pytest.mark.parametrize("name", BUILD)
def test_generation_equals_scoring_and_beams_move(name):
    model, _ = build(name)
    model.eval()
    stream, state = tokens(2, 14), {}
    order = torch.tensor([1, 0])
    with torch.no_grad():
        steps = [model.decoder(stream[:, : i + 1], incremental_state=state)[0] for i in range(6)]
        model.decoder.reorder_incremental_state(state, order)
        after = stream[order]
        steps += [
            model.decoder(after[:, : i + 1], incremental_state=state)[0] for i in range(6, 14)
        ]
    expected = scores_by_segment(model, stream, 1)
    torch.testing.assert_close(torch.cat(steps[:6], dim=1), expected[:, :6])
    torch.testing.assert_close(torch.cat(steps[6:], dim=1), expected[order][:, 6:])
