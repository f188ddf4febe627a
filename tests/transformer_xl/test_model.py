"""Transformer-XL: its equations, its ablations, and the tokens that a token sees."""

import pytest
import torch

from fairseq_plugins.segment_language_model import attention_blocks
from fairseq_plugins.segment_language_model.attention import PositionBiases, RelativeAttention
from fairseq_plugins.segment_language_model.attention_blocks import UNLIMITED, Clamped, Window
from fairseq_plugins.segment_language_model.key_value_cache import HiddenStates
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedRelativeKeys,
    LearnedRelativePositions,
    RelativeKeyProjection,
    SinusoidalRelativePositions,
)
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests.gradients import assert_same
from tests.reference import transformer_xl as reference
from tests.segment_language_model.reading import assert_generates_as, assert_reads_as
from tests.tiny import scores_by_segment, tiny_transformer_xl, tokens

STREAMS, HEADS, WIDTH = 2, 2, 8
POSITIONS = ["transformer-xl", "shaw", "learned-absolute", "sinusoidal-absolute"]


def make_attention(positions, window, clamp_len, kernel="fast"):
    """Return an attention with random weights, and the encoding of its distances."""
    torch.manual_seed(1)
    if positions == "shaw":
        table, encoding = LearnedRelativeKeys(HEADS, 6, WIDTH // HEADS), Distances(clamp_len)
        biases = None
    else:
        table = RelativeKeyProjection(WIDTH, HEADS)
        encoding = SinusoidalRelativePositions(WIDTH, clamp_len)
        biases = PositionBiases(HEADS, WIDTH // HEADS)
        torch.nn.init.normal_(biases.u)
        torch.nn.init.normal_(biases.v)
    attention = RelativeAttention(WIDTH, HEADS, window, table, biases, kernel=kernel)
    return attention.double(), encoding


@pytest.mark.parametrize(("kernel", "block"), [("fast", 2), ("fast", 128), ("plain", None)])
@pytest.mark.parametrize("positions", ["transformer-xl", "shaw"])
@pytest.mark.parametrize("clamp_len", [None, 1])
@pytest.mark.parametrize(
    ("remembered", "length", "farthest"),
    [(0, 1, UNLIMITED), (0, 7, UNLIMITED), (5, 4, UNLIMITED), (6, 5, 5), (9, 5, 3), (3, 5, 0)],
)
def test_values_and_gradients_equal_the_equations(
    monkeypatch, kernel, block, positions, clamp_len, remembered, length, farthest
):
    monkeypatch.setattr(attention_blocks, "QUERY_BLOCK", block)
    attention, encoding = make_attention(positions, Window(0, farthest), clamp_len, kernel)
    x = torch.randn(STREAMS, length, WIDTH, dtype=torch.float64, requires_grad=True)
    past = torch.randn(STREAMS, remembered, WIDTH, dtype=torch.float64, requires_grad=True)
    terms = attention.project_positions(encoding(remembered + length - 1))
    fast, _ = attention(x, terms, HiddenStates(past) if remembered else None)
    rest = (lambda d: d <= farthest), reference.encoder(attention, clamp_len)
    streams = zip(x, torch.cat([past, x], dim=1), strict=True)
    slow = torch.stack([reference.attention(attention, *stream, *rest) for stream in streams])
    assert_same(fast, slow, [x, past, *attention.parameters()])


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
    nearer, clamp, farther = map(positions, (2, 3, 7))
    assert (len(nearer), len(clamp)) == (4, 5)
    assert isinstance(farther, Clamped)
    assert torch.equal(farther.rows, clamp)
    assert torch.equal(clamp[1:], nearer)


def test_dropout_acts_on_each_distance_beyond_the_clamp():
    dropout = torch.nn.Dropout(0.5)
    torch.manual_seed(1)
    found = SinusoidalRelativePositions(WIDTH, 3, dropout)(7)
    whole = SinusoidalRelativePositions(WIDTH)(3)
    torch.manual_seed(1)
    assert torch.equal(found, dropout(torch.cat([whole[:1].expand(4, -1), whole])))
    assert not torch.equal(found[0], found[1])


NETWORKS = [
    {},
    {"untie_r": True, "clamp_len": 9},
    {"decoder_normalize_before": True},
    {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    {"share_decoder_input_output_embed": True, "output_bias": True},
    {"positions": "shaw"},
    {"positions": "shaw", "clamp_len": 4},
    *({"positions": positions, "mem_len": 0} for positions in POSITIONS),
]


@pytest.mark.parametrize("options", NETWORKS)
def test_scores_are_the_references_however_a_text_is_read(options):
    model = tiny_transformer_xl(**{"mem_len": 20, "tokens_per_sample": 20, **options}).double()
    stream = tokens(2, 20)
    rest = (lambda _: True), options.get("clamp_len")
    expected = torch.stack([reference.network(model.decoder, row, *rest) for row in stream])
    assert_reads_as(model, stream, expected, () if "mem_len" in options else (1, 7))
    assert_generates_as(model, stream, expected)


def seen_by(model, length, start):
    """Return (T, S): whether token s of the text changes the scores of token t of the segment."""
    stream = tokens(1, start + length)

    def scores(text):
        recurrence = Recurrence()
        with torch.no_grad():
            if start:
                model(text[:, :start], recurrence=recurrence, start=0)
            return model(text[:, start:], recurrence=recurrence, start=start)[0]

    base = scores(stream)
    seen = torch.zeros(length, start + length, dtype=torch.bool)
    for changed in range(start + length):
        other = stream.clone()
        other[0, changed] = (other[0, changed] - 3) % 16 + 4
        seen[:, changed] = (scores(other) != base).any(dim=-1)[0]
    return seen


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"mem_len": 4, "same_length": True}, [4] * 6),
        ({"mem_len": 4, "same_length": True, "same_length_besides_itself": True}, [5] * 6),
        ({"mem_len": 4}, [5, 6, 7, 8, 9, 10]),
        ({"mem_len": 0}, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_a_token_sees_the_recurrence_and_its_segment_or_always_as_many(options, seen):
    model = tiny_transformer_xl(decoder_layers=1, **options).double()
    assert seen_by(model, 6, 6).sum(dim=1).tolist() == seen


@torch.no_grad()
def generate(model, stream):
    """Read a stream as in generation; return the scores of the last token, and the state."""
    state = {}
    for end in range(1, stream.size(1) + 1):
        last, _ = model.eval().decoder(stream[:, :end], incremental_state=state)
    return last, state


def test_generation_keeps_no_more_than_it_reads():
    model = tiny_transformer_xl(mem_len=5)
    _, state = generate(model, tokens(2, 40))
    (history,) = state["recurrence"].histories.values()
    assert all(layer.length == 6 for layer in history.layers)
    assert all(layer.buffers.keys.size(2) < 10 for layer in history.layers)
    # positions cover only the distances 5 to -1
    with torch.no_grad():
        assert model.decoder.positions_of_layers(5, 5)[0].size(1) == 5 + 2


def test_generation_without_recurrence_sees_as_many_tokens_as_a_segment():
    model, stream = tiny_transformer_xl(mem_len=0, decoder_layers=1).double(), tokens(1, 12)
    last, _ = generate(model, stream)
    torch.testing.assert_close(last, model(stream[:, -8:])[0][:, -1:])


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_activation_checkpointing_changes_neither_values_nor_gradients(positions, normalize_before):
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_far_positions_apart(dtype):
    half, exact = (tiny_transformer_xl(mem_len=600).to(kind).decoder for kind in (dtype, None))
    (table, *_), (expected, *_) = (part.positions_of_layers(590, 590) for part in (half, exact))
    assert table.dtype == dtype
    torch.testing.assert_close(table.float(), expected, atol=0.05, rtol=0.05)


def parameters(**options):
    return {name: p.shape for name, p in tiny_transformer_xl(**options).named_parameters()}


def test_each_position_encoding_has_the_parameters_that_it_names_and_no_others():
    plain = parameters(positions="sinusoidal-absolute")
    layers = [f"decoder.layers.{i}.self_attn" for i in range(3)]
    projection = {f"{layer}.position_projection.proj.weight": (16, 16) for layer in layers}
    own = {f"{layer}.biases.{name}": (2, 8) for layer in layers for name in "uv"}
    # shared by all layers, and named after the first one
    shared = {f"{layers[0]}.biases.{name}": (2, 8) for name in "uv"}
    # recurrence 8, segment 8: distances 0 to 15
    tables = {f"{layer}.position_projection.weight": (2, 16, 8) for layer in layers}
    assert parameters() == {**plain, **projection, **shared}
    assert parameters(untie_r=True) == {**plain, **projection, **own}
    assert parameters(positions="shaw") == {**plain, **tables}
    learned = {"decoder.absolute_positions.weight": (3, 8, 16)}
    assert parameters(positions="learned-absolute") == {**plain, **learned}


def test_shaw_distances_beyond_those_trained_share_the_last_vector():
    trained = tiny_transformer_xl(positions="shaw", mem_len=4, tokens_per_sample=4).double()
    longer = tiny_transformer_xl(positions="shaw", mem_len=40, tokens_per_sample=4).double()
    # distributed training keeps references to the parameters from before loading
    held = list(map(id, longer.parameters()))
    longer.load_state_dict(trained.state_dict())
    assert longer.decoder.layers[0].self_attn.position_projection.farthest == 7
    assert list(map(id, longer.parameters())) == held
    stream = tokens(1, 15)
    expected = reference.network(trained.decoder, stream[0], lambda distance: True)
    torch.testing.assert_close(scores_by_segment(longer, stream, 5)[0], expected)


def test_positions_beyond_training_are_warned_about_or_refused(caplog):
    sinusoids, learned = (
        tiny_transformer_xl(positions=positions) for positions in POSITIONS[:1:-1]
    )
    sinusoids(tokens(1, 8))
    assert not caplog.text
    sinusoids(tokens(1, 9))
    assert "a segment has 9 tokens, its context included, and positions were trained up to 8" in (
        caplog.text
    )
    message = "a segment of 9 tokens, --extended-context included, is longer than the 8 places"
    with pytest.raises(ValueError, match=message):
        learned(tokens(1, 9))
    generate(learned, tokens(1, 8))
    with pytest.raises(ValueError, match=message):
        generate(learned, tokens(1, 9))
    with pytest.raises(ValueError, match=r"^`max_positions` is 8: place 9 has no vector$"):
        learned.decoder.absolute_positions.add_to_layer(torch.zeros(1, 2, 16), 0, first=7)
    # generation ends at this length
    assert learned.max_positions() == sinusoids.max_positions() == 8
    assert tiny_transformer_xl().max_positions() > 1_000_000
