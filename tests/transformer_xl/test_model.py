"""Whole Transformer-XL models and their ablations, and the tokens that a token sees."""

import pytest
import torch

from tests.reference import transformer_xl as reference
from tests.segment_language_model.reading import (
    assert_generates_as,
    assert_reads_as,
    precise_reader,
)
from tests.tiny import scores_by_segment, tiny_transformer_xl, tokens

POSITIONS = ["transformer-xl", "shaw", "learned-absolute", "sinusoidal-absolute"]
NETWORKS = [
    {},
    {"untie_r": True, "clamp_len": 9},
    {"decoder_normalize_before": True},
    {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    {"share_decoder_input_output_embed": True, "output_bias": True},
    {"positions": "shaw"},
    {"positions": "shaw", "clamp_len": 4},
    *({"positions": positions, "mem_len": 0} for positions in POSITIONS),
    {"mem_len": 4, "same_length": True},
    {"mem_len": 4, "same_length": True, "same_length_excludes_self": True},
]


@pytest.mark.parametrize("options", NETWORKS)
def test_scores_equal_the_reference_in_any_segments(options):
    model = tiny_transformer_xl(**{"mem_len": 20, "tokens_per_sample": 20, **options}).double()
    stream, farthest = tokens(2, 20), 20
    if "same_length" in options:
        # the published code counts the token itself, too
        farthest = 4 if "same_length_excludes_self" in options else 3
    pre_norm = options.get("decoder_normalize_before", False)
    last_norm = model.decoder.network.layer_norm
    if not pre_norm or "no_decoder_final_norm" in options:
        assert last_norm is None
    rest = (lambda distance: distance <= farthest), options.get("clamp_len"), pre_norm, last_norm
    expected = torch.stack([reference.network(model.decoder, row, *rest) for row in stream])
    assert_reads_as(model, stream, expected, () if options.get("mem_len") == 0 else (1, 7))
    assert_generates_as(model, stream, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_segment_sees_as_much_of_the_past_as_the_recurrence_holds(mode):
    model, stream = tiny_transformer_xl(mem_len=4, decoder_layers=1).double(), tokens(2, 12)
    scores = scores_by_segment(model, stream, 6, mode)
    torch.testing.assert_close(scores[:, 6:], model(stream[:, 2:])[0][:, 4:])


@pytest.mark.parametrize(("mem_len", "seen"), [(5, 6), (0, 8)])
@torch.no_grad()
def test_generation_sees_the_recurrence_and_without_one_a_segment(mem_len, seen):
    model, stream = tiny_transformer_xl(mem_len=mem_len, decoder_layers=1).double(), tokens(1, 12)
    expected = model.eval()(stream[:, -seen:])[0][:, -1].log_softmax(-1)
    for prompt in (1, 5, 11):
        reader = precise_reader(model, segment=3)
        list(reader.read_prompts(stream[:, :prompt]))
        for end in range(prompt + 1, 13):
            (last,) = reader.read(stream[:, :end])
        torch.testing.assert_close(last[:, -1], expected)


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_activation_checkpointing_changes_no_gradient(positions, normalize_before):
    options = {"positions": positions, "decoder_normalize_before": normalize_before}
    results = []
    for checkpointed in (False, True):
        model = tiny_transformer_xl(
            **options, checkpoint_activations=checkpointed, dropout=0.3, attention_dropout=0.3
        ).double()
        torch.manual_seed(5)
        scores = scores_by_segment(model, tokens(2, 16), 8, torch.enable_grad)
        gradients = torch.autograd.grad(scores.logsumexp(-1).sum(), list(model.parameters()))
        results.append((scores, *gradients))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_each_position_encoding_has_its_parameters_alone():
    def parameters(**options):
        return sum(p.numel() for p in tiny_transformer_xl(**options).parameters())

    plain = parameters(positions="sinusoidal-absolute")
    # of each layer W_kR, and u and v of all
    assert parameters() == plain + 3 * 16 * 16 + 2 * 16
    assert parameters(untie_r=True) == plain + 3 * (16 * 16 + 2 * 16)
    # recurrence 8, segment 8: distances 0 to 15 of each head, and 8 places
    assert parameters(positions="shaw") == plain + 3 * 16 * 16
    assert parameters(positions="shaw", clamp_len=4) == plain + 3 * 5 * 16
    for context in (0, 4):
        learned = parameters(positions="learned-absolute", extended_context=context)
        assert learned == plain + 3 * (8 + context) * 16


def test_the_past_is_as_long_as_the_segment_by_default():
    absolute, extended = {"positions": "learned-absolute"}, {"extended_context": 4}
    for options, length in [({}, 8), ({"mem_len": 3}, 3), (absolute, 0), (extended, 0)]:
        assert tiny_transformer_xl(**options).decoder.network.mem_len == length


def test_shaw_distances_beyond_the_table_share_its_last_vector():
    trained = tiny_transformer_xl(positions="shaw", mem_len=4, tokens_per_sample=4).double()
    longer = tiny_transformer_xl(positions="shaw", mem_len=40, tokens_per_sample=4).double()
    # distributed training keeps references to the parameters from before loading
    held = list(map(id, longer.parameters()))
    longer.load_state_dict(trained.state_dict())
    assert longer.decoder.network.layers[0].self_attn.position_projection.farthest == 7
    assert list(map(id, longer.parameters())) == held
    stream = tokens(1, 15)
    expected = reference.network(trained.decoder, stream[0], lambda distance: True)
    torch.testing.assert_close(scores_by_segment(longer, stream, 5)[0], expected)


def test_generation_ends_with_the_trained_positions():
    learned, sinusoids = (tiny_transformer_xl(positions=name) for name in POSITIONS[2:])
    assert learned.max_positions() == sinusoids.max_positions() == 8
    assert tiny_transformer_xl().max_positions() > 1_000_000

    def read_token_by_token(length):
        reader = precise_reader(learned, segment=8)
        return [list(reader.read(tokens(1, length)[:, :end])) for end in range(1, length + 1)]

    assert len(read_token_by_token(8)) == 8
    for score in (lambda: read_token_by_token(9), lambda: learned(tokens(1, 9))):
        with pytest.raises(ValueError, match=r"^`max_positions` is 8: place 9 has no vector$"):
            score()
    # sinusoids have a vector for each place
    sinusoids(tokens(1, 9))
