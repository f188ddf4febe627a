"""Transformer-XL: its equations, its ablations, its options, its presets."""

import dataclasses
import itertools

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY

from fairseq_plugins.models.transformer_xl import TransformerXLConfig, TransformerXLLanguageModel
from fairseq_plugins.modules import window_attention as window_attention_file
from fairseq_plugins.modules.layer_states import HiddenStates
from fairseq_plugins.modules.relative_attention import PositionBiases, RelativeAttention
from fairseq_plugins.modules.relative_positions import (
    Distances,
    LearnedDistanceTable,
    ProjectedDistanceTable,
    SinusoidalRelativePositions,
)
from fairseq_plugins.modules.segment_memory import SegmentMemory
from fairseq_plugins.modules.variational_dropout import LockedDropout
from fairseq_plugins.modules.window_attention import UNLIMITED, Window
from tests.reference import transformer_xl as reference
from tests.test_segment_language_model import scores_by_segment
from tests.tiny import SEGMENTS, dictionary, tiny_transformer_xl, tokens

STREAMS, HEADS, WIDTH = 2, 2, 8
POSITIONS = ["transformer-xl", "shaw", "learned-absolute", "sinusoidal-absolute"]


def make_attention(positions, window, clamp_len):
    """An attention of random weights, and the encoding of its distances."""
    torch.manual_seed(1)
    if positions == "shaw":
        table, encoding = LearnedDistanceTable(HEADS, 6, WIDTH // HEADS), Distances(clamp_len)
        biases = None
    else:
        table = ProjectedDistanceTable(WIDTH, HEADS)
        encoding = SinusoidalRelativePositions(WIDTH, clamp_len)
        biases = PositionBiases(HEADS, WIDTH // HEADS)
        torch.nn.init.normal_(biases.u)
        torch.nn.init.normal_(biases.v)
    return RelativeAttention(WIDTH, HEADS, window, table, biases).double(), encoding


@pytest.mark.parametrize("block", [2, 128])
@pytest.mark.parametrize("positions", ["transformer-xl", "shaw"])
@pytest.mark.parametrize("clamp_len", [None, 3])
@pytest.mark.parametrize(
    ("remembered", "length", "farthest"),
    [(0, 1, UNLIMITED), (0, 7, UNLIMITED), (5, 4, UNLIMITED), (6, 5, 5), (9, 5, 3), (3, 5, 0)],
)
def test_values_and_gradients_equal_the_double_loop(
    monkeypatch, block, positions, clamp_len, remembered, length, farthest
):
    monkeypatch.setattr(window_attention_file, "QUERY_BLOCK", block)
    attention, encoding = make_attention(positions, Window(0, farthest), clamp_len)
    x = torch.randn(STREAMS, length, WIDTH, dtype=torch.float64, requires_grad=True)
    memory = torch.randn(STREAMS, remembered, WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    inputs = [x, memory, *attention.parameters()]

    table = attention.distance_table(encoding(remembered + length - 1))
    fast, _ = attention(x, table, HiddenStates(memory) if remembered else None)
    context = torch.cat([memory, x], dim=1)
    encode = reference.encoder(attention, clamp_len)
    slow = torch.stack(
        [
            reference.attention(attention, x[b], context[b], lambda d: d <= farthest, encode)
            for b in range(STREAMS)
        ]
    )
    torch.testing.assert_close(fast, slow)
    gradients = [
        torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True, materialize_grads=True)
        for out in (fast, slow)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


NETWORKS = [
    {},
    {"untie_r": True},
    {"decoder_normalize_before": True},
    {"decoder_normalize_before": True, "no_decoder_final_norm": True},
    {"share_decoder_input_output_embed": True, "output_bias": True},
    *({"positions": positions} for positions in POSITIONS[1:]),
    {"positions": "shaw", "clamp_len": 4},
]


@pytest.mark.parametrize("options", NETWORKS)
def test_scores_equal_the_reference(options):
    model = tiny_transformer_xl(tokens_per_sample=12, **options).double()
    stream = tokens(1, 12)
    expected = reference.network(
        model.decoder, stream[0], lambda distance: True, options.get("clamp_len")
    )
    torch.testing.assert_close(model(stream)[0][0], expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"untie_r": True, "clamp_len": 9},
        {"positions": "shaw"},
        {"decoder_normalize_before": True},
    ],
)
def test_loss_does_not_depend_on_segment_length_where_memory_covers_the_history(mode, options):
    model = tiny_transformer_xl(mem_len=100, **options).double()
    stream = tokens(3, 90)
    whole = scores_by_segment(model, stream, 90, mode)
    for length in (1, 7, 64):
        torch.testing.assert_close(scores_by_segment(model, stream, length, mode), whole)


def seen_by(model, length, start):
    """Which of the tokens so far change the scores of each token of a later segment, (T, S)."""
    stream = tokens(1, start + length)

    def scores(text):
        memory = SegmentMemory()
        with torch.no_grad():
            if start:
                model(text[:, :start], memory=memory.at(0))
            return model(text[:, start:], memory=memory.at(start))[0]

    base = scores(stream)
    seen = torch.zeros(length, start + length, dtype=torch.bool)
    for changed in range(start + length):
        other = stream.clone()
        other[0, changed] = (other[0, changed] - 3) % 16 + 4
        seen[:, changed] = (scores(other) != base).any(dim=-1)[0]
    return seen


def test_same_length_shows_every_token_mem_len_tokens_itself_included():
    model = tiny_transformer_xl(mem_len=4, same_length=True, decoder_layers=1).double()
    assert seen_by(model, 6, 6).sum(dim=1).tolist() == [4] * 6


def test_without_same_length_a_token_sees_the_memory_and_the_segment_up_to_itself():
    model = tiny_transformer_xl(mem_len=4, decoder_layers=1).double()
    assert seen_by(model, 6, 6).sum(dim=1).tolist() == [5, 6, 7, 8, 9, 10]


def test_without_recurrence_a_token_sees_its_segment_only():
    model = tiny_transformer_xl(mem_len=0, decoder_layers=1).double()
    assert seen_by(model, 6, 6).sum(dim=1).tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("recurrent", [True, False])
def test_incremental_decoding_equals_one_pass(positions, recurrent):
    mem_len = 20 if recurrent and positions in POSITIONS[:2] else 0
    options = {"positions": positions, "mem_len": mem_len, "tokens_per_sample": 20}
    model = tiny_transformer_xl(**options).double().eval()
    stream = tokens(2, 20)
    state = {}
    with torch.no_grad():
        steps = [model.decoder(stream[:, : i + 1], incremental_state=state)[0] for i in range(20)]
        whole = model(stream)[0]
    assert all(step.size(1) == 1 for step in steps)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole)


def test_generation_keeps_no_more_than_the_memory():
    model = tiny_transformer_xl(mem_len=5).eval()
    stream = tokens(2, 40)
    state = {}
    with torch.no_grad():
        for i in range(40):
            model.decoder(stream[:, : i + 1], incremental_state=state)
    cursor = state["segment_memory"].at(40)
    (history,) = state["segment_memory"]._histories.values()
    assert all(layer.length == 6 for layer in history.layers)
    assert all(layer.key_buffer.size(2) < 20 for layer in history.layers)
    # distances 5 to -1
    assert cursor.constants(model.decoder)["tables"][0].size(1) == 5 + 2


def test_generation_without_recurrence_sees_as_many_tokens_as_a_segment():
    model = tiny_transformer_xl(mem_len=0, decoder_layers=1).double().eval()
    stream = tokens(1, 12)
    state = {}
    with torch.no_grad():
        for i in range(12):
            last = model.decoder(stream[:, : i + 1], incremental_state=state)[0]
        torch.testing.assert_close(last, model(stream[:, -8:])[0][:, -1:])


def test_positions_are_not_kept_from_training_with_dropout():
    model, stream = tiny_transformer_xl(embed_dropout=0.5).double(), tokens(2, 12)
    memory = SegmentMemory()
    with torch.no_grad():
        model(stream[:, :6], memory=memory.at(0))
        model.eval()
        model(stream[:, :6], memory=memory.at(0))
        found = model(stream[:, 6:], memory=memory.at(6))[0]
    torch.testing.assert_close(found, scores_by_segment(model, stream, 6)[:, 6:])


def test_projected_positions_follow_the_weights_from_walk_to_walk():
    model, stream = tiny_transformer_xl().double(), tokens(2, 12)
    first = scores_by_segment(model, stream, 4)
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.self_attn.distance_table.proj.weight *= 2
    again = scores_by_segment(model, stream, 4)
    assert not torch.allclose(first, again)
    torch.testing.assert_close(again, scores_by_segment(model, stream, 4, torch.enable_grad))


@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
def test_activation_checkpointing_changes_neither_values_nor_gradients(positions, normalize_before):
    results = []
    for checkpointed in (False, True):
        model = tiny_transformer_xl(
            positions=positions,
            decoder_normalize_before=normalize_before,
            checkpoint_activations=checkpointed,
            dropout=0.3,
            attention_dropout=0.3,
        ).double()
        stream, memory = tokens(2, 16), SegmentMemory()
        torch.manual_seed(5)
        scores = [model(stream[:, i : i + 8], memory=memory.at(i))[0] for i in (0, 8)]
        loss = torch.cat(scores, dim=1).logsumexp(-1).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        results.append((loss, *gradients))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_far_positions_apart(dtype):
    model = tiny_transformer_xl(mem_len=600, decoder_layers=1).to(dtype)
    table = model.decoder._distance_tables(590, 590, None)[0]
    assert table.dtype == dtype
    exact = tiny_transformer_xl(mem_len=600, decoder_layers=1)
    expected = exact.decoder._distance_tables(590, 590, None)[0]
    torch.testing.assert_close(table.float(), expected, atol=0.05, rtol=0.05)


def parameters(**options):
    return {name: p.shape for name, p in tiny_transformer_xl(**options).named_parameters()}


def test_each_position_encoding_has_the_parameters_that_it_names_and_no_others():
    plain = parameters(positions="sinusoidal-absolute")
    layers = range(3)
    projection = {
        f"decoder.layers.{i}.self_attn.distance_table.proj.weight": (16, 16) for i in layers
    }
    # shared by the layers: named where they are first met
    shared = {f"decoder.layers.0.self_attn.biases.{name}": (2, 8) for name in "uv"}
    own = {f"decoder.layers.{i}.self_attn.biases.{name}": (2, 8) for i in layers for name in "uv"}
    # memory 8, segment 8: distances 0 to 15
    tables = {f"decoder.layers.{i}.self_attn.distance_table.weight": (2, 16, 8) for i in layers}
    assert parameters() == {**plain, **projection, **shared}
    assert parameters(untie_r=True) == {**plain, **projection, **own}
    assert parameters(positions="shaw") == {**plain, **tables}
    learned = {"decoder.absolute_positions.weight": (3, 8, 16)}
    assert parameters(positions="learned-absolute") == {**plain, **learned}


def test_recurrence_changes_no_parameter():
    assert parameters(mem_len=0) == parameters() == parameters(mem_len=50)


def test_ablations_combine_freely():
    for positions, mem_len, before in itertools.product(POSITIONS, (0, 8), (False, True)):
        if mem_len and positions in POSITIONS[2:]:
            continue
        model = tiny_transformer_xl(
            positions=positions, mem_len=mem_len, decoder_normalize_before=before
        )
        assert scores_by_segment(model, tokens(2, 16), 8).isfinite().all()


def test_shaw_distances_beyond_those_trained_share_the_last_vector():
    trained = tiny_transformer_xl(positions="shaw", mem_len=4, tokens_per_sample=4).double()
    longer = tiny_transformer_xl(positions="shaw", mem_len=40, tokens_per_sample=4).double()
    # distributed training holds on to the parameters that it was given before loading
    held = list(map(id, longer.parameters()))
    longer.load_state_dict(trained.state_dict())
    assert longer.decoder.layers[0].self_attn.distance_table.farthest == 7
    assert list(map(id, longer.parameters())) == held
    stream = tokens(1, 15)
    expected = reference.network(trained.decoder, stream[0], lambda distance: True)
    torch.testing.assert_close(scores_by_segment(longer, stream, 5)[0], expected)


def test_sinusoids_beyond_those_trained_are_said(caplog):
    model = tiny_transformer_xl(positions="sinusoidal-absolute")
    model(tokens(1, 8))
    assert not caplog.text
    model(tokens(1, 9))
    assert "a segment has 9 tokens, its context included, and positions were trained up to 8" in (
        caplog.text
    )


def test_an_empty_window_is_refused():
    with pytest.raises(ValueError, match=r"the window .* is empty: nothing would be left"):
        RelativeAttention(WIDTH, HEADS, Window(0, -1))


def test_places_beyond_those_trained_are_refused():
    model = tiny_transformer_xl(positions="learned-absolute")
    message = "a segment of 9 tokens, --extended-context included, is longer than the 8 places"
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 9))


def test_a_checkpoint_of_other_places_is_refused():
    trained = tiny_transformer_xl(positions="learned-absolute", tokens_per_sample=4)
    message = "position vectors for segments of 4 tokens, and this model for 8: resume with the"
    with pytest.raises(ValueError, match=message):
        tiny_transformer_xl(positions="learned-absolute").load_state_dict(trained.state_dict())


def test_generation_ends_where_absolute_positions_do():
    assert tiny_transformer_xl(positions="learned-absolute").max_positions() == 8
    assert tiny_transformer_xl().max_positions() > 1_000_000


def test_weights_are_drawn_as_published():
    model = tiny_transformer_xl(
        decoder_embed_dim=128, decoder_ffn_embed_dim=256, init_std=0.05, untie_r=True
    )
    decoder = model.decoder
    assert decoder.embed_scale == 128**0.5
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.numel() >= 128:
            mean = 1 if "layer_norm" in name else 0
            assert abs(parameter.mean() - mean) < 0.02, name
            assert abs(parameter.std() - 0.05) < 0.02, name
    assert not decoder.embed_tokens.weight[dictionary().pad()].any()


ADAPTIVE = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "8,14",
    "adaptive_input_factor": 2,
    "adaptive_softmax_cutoff": "8,14",
    "adaptive_softmax_factor": 2,
    "tie_adaptive_weights": True,
    "tie_adaptive_proj": True,
    "output_bias": True,
}


def test_adaptive_projections_are_drawn_narrower():
    wide = {"decoder_embed_dim": 64, "init_std": 0.5, "tie_adaptive_proj": False}
    decoder = tiny_transformer_xl(**{**ADAPTIVE, **wide}).decoder
    softmax = decoder.adaptive_softmax
    projections = [band[1] for band in decoder.embed_tokens.embeddings]
    for projection in [*projections, softmax.head[0], *(tail[0] for tail in softmax.tail)]:
        assert abs(projection.weight.std() - 0.01) < 0.002
    assert abs(decoder.embed_tokens.embeddings[0][0].weight.std() - 0.5) < 0.1


def test_bands_of_full_width_have_no_projection():
    full = {"adaptive_input_factor": 1, "adaptive_softmax_factor": 1}
    model = tiny_transformer_xl(**{**ADAPTIVE, **full}).double()
    decoder, stream = model.decoder, tokens(2, 8)
    weights = torch.cat([band[0].weight for band in decoder.embed_tokens.embeddings])
    assert torch.equal(decoder.embed_tokens(stream).double(), weights.float()[stream].double())
    assert not any("proj" in name and "embed" in name for name, _ in model.named_parameters())
    with torch.no_grad():
        probs = model.get_normalized_probs(model(stream), log_probs=False)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 8).to(probs))


def test_adaptive_io_ties_all_but_the_first_projection():
    decoder = tiny_transformer_xl(**ADAPTIVE).decoder
    softmax, bands = decoder.adaptive_softmax, decoder.embed_tokens.embeddings
    first, head, bias = softmax.head
    assert first.weight.shape == (16, 16)
    assert first.weight is not bands[0][1].weight
    assert head.word_proj.weight is bands[0][0].weight
    assert bias.bias.shape == (8 + 2,)
    for tail, band in zip(softmax.tail, bands[1:], strict=True):
        assert tail[0].weight is band[1].weight
        assert tail[2].weight is band[0].weight
        assert tail[3].bias.shape == (band[0].num_embeddings,)


def test_every_dropout_acts_in_training_and_in_training_only():
    stream = tokens(2, 8)
    plain = tiny_transformer_xl()(stream)[0]
    names = ["dropout", "embed_dropout", "output_dropout", "attention_dropout"]
    for name in [*names, "activation_dropout", "word_dropout"]:
        for locked in (False, True):
            model = tiny_transformer_xl(**{name: 0.5}, locked_dropout=locked)
            assert not torch.allclose(model(stream)[0], plain), name
            torch.testing.assert_close(model.eval()(stream)[0], plain)


def test_locked_dropout_is_of_one_kind_everywhere():
    def kinds(**options):
        model = tiny_transformer_xl(**options)
        return {type(m) for m in model.modules() if type(m) in (LockedDropout, torch.nn.Dropout)}

    assert kinds(locked_dropout=True) == {LockedDropout}
    assert kinds() == {torch.nn.Dropout}


def test_position_encodings_are_dropped_with_the_embeddings():
    model = tiny_transformer_xl(embed_dropout=0.5)
    encoding = model.decoder.positions(30)
    assert 0.3 < (encoding == 0).float().mean() < 0.7
    locked = tiny_transformer_xl(embed_dropout=0.5, locked_dropout=True).decoder.positions(30)
    dropped = (locked == 0).all(dim=0)
    zeros = model.eval().decoder.positions(30) == 0
    assert torch.equal((locked == 0)[:, ~dropped], zeros[:, ~dropped])
    assert dropped.any()
    # absolute ones are part of what the embeddings' dropout drops
    absolute = tiny_transformer_xl(embed_dropout=0.5, positions="sinusoidal-absolute")
    assert (absolute.decoder._embed(tokens(2, 8), 0) == 0).any()


# each message, with the options that cause it
BAD_OPTIONS = [
    ({"mem_len": "128"}, "--mem-len is '128': it must be at least 0"),
    ({"same_length": "yes"}, "--same-length is 'yes': give True or False"),
    ({"mem_len": -1}, "--mem-len is -1: it must be at least 0"),
    ({"clamp_len": 0}, "--clamp-len is 0: it must be at least 1; leave it out for no limit"),
    (
        {"decoder_attention_heads": 3},
        "--decoder-attention-heads is 3: it must divide --decoder-embed-dim, 16",
    ),
    (
        {"positions": "sinusoidal-absolute", "mem_len": 8},
        "--mem-len is 8 with --positions sinusoidal-absolute: a remembered token and one of the "
        "segment at the same place would look alike",
    ),
    (
        {"positions": "learned-absolute", "clamp_len": 8},
        "--clamp-len with --positions learned-absolute: it acts on distances",
    ),
    (
        {"positions": "learned-absolute", "same_length": True},
        "--same-length with --positions learned-absolute: it acts on distances",
    ),
    ({"positions": "shaw", "untie_r": True}, "--untie-r with --positions shaw: only"),
    (
        {"decoder_embed_dim": 15, "decoder_attention_heads": 3},
        "--decoder-embed-dim is 15: sinusoids need an even width",
    ),
    ({"word_dropout": 1.0}, r"--word-dropout is 1.0: it must be in \[0, 1\)"),
    ({"init_std": 0.0}, "--init-std is 0.0: it must be above 0"),
    ({"same_length": True, "mem_len": 0}, "--same-length with --mem-len 0 leaves nothing"),
    (
        {"same_length": True, "extended_context": 4},
        "--same-length: without a memory there is nothing to attend to; give --mem-len",
    ),
    (
        {"adaptive_input": True, "adaptive_input_cutoff": "8", "adaptive_input_factor": 0},
        "--adaptive-input-factor is 0: it must be at least 1",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_options_that_make_no_model_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        tiny_transformer_xl(**options)


def test_memory_is_as_long_as_the_segment_unless_told():
    assert tiny_transformer_xl().decoder.context.memory == 8
    assert tiny_transformer_xl(mem_len=3).decoder.context.memory == 3
    assert tiny_transformer_xl(positions="learned-absolute").decoder.context.memory == 0
    assert tiny_transformer_xl(extended_context=4).decoder.context.memory == 0


def build_preset(name, symbols):
    """The model of a preset on the meta device, for ``symbols`` symbols, special ones included."""
    cfg = TransformerXLConfig(**SEGMENTS)
    blank = type("Namespace", (), {})()
    ARCH_CONFIG_REGISTRY[name](blank)
    for option, value in vars(blank).items():
        assert hasattr(cfg, option), f"{name} sets {option}, which is no option"
        setattr(cfg, option, value)
    vocabulary = dictionary()
    for number in range(symbols - len(vocabulary)):
        vocabulary.add_symbol(str(number))
    task = type("Task", (), {"source_dictionary": vocabulary})()
    with torch.device("meta"):
        model = TransformerXLLanguageModel.build_model(cfg, task)
    return cfg, model


# parameters of the published code, with its vocabulary (None: told only in millions)
PRESETS = {
    "transformer_xl_enwik8_base": (41_055_949, 205),
    "transformer_xl_enwik8_18l": (88_000_000, 205),
    "transformer_xl_enwik8_large": (277_232_845, 205),
    "transformer_xl_text8_large": (277_051_420, 28),
    "transformer_xl_wt103_base": (151_107_538, 267_735),
    "transformer_xl_wt103_large": (285_170_506, 267_735),
    "transformer_xl_lm1b_base": (357_468_018, 793_471),
    "transformer_xl_lm1b_large": (840_758_382, 793_471),
    "transformer_xl_ptb": (24_040_400, 10_000),
}
# layers, width, heads, head width, inner width; cutoffs and factor; dropout, attention dropout
PUBLISHED = {
    "transformer_xl_enwik8_base": (12, 512, 8, 64, 2048, None, 0.1, 0.0),
    "transformer_xl_enwik8_large": (24, 1024, 8, 128, 3072, None, 0.15, 0.15),
    "transformer_xl_text8_large": (24, 1024, 8, 128, 3072, None, 0.15, 0.15),
    "transformer_xl_wt103_base": (16, 410, 10, 41, 2100, ("20000,40000,200000", 1), 0.1, 0.0),
    "transformer_xl_wt103_large": (18, 1024, 16, 64, 4096, ("20000,40000,200000", 4), 0.2, 0.2),
    "transformer_xl_lm1b_base": (18, 1024, 8, 128, 4096, ("60000,100000,640000", 4), 0.0, 0.0),
    "transformer_xl_lm1b_large": (24, 1280, 16, 80, 8192, ("60000,100000,640000", 4), 0.05, 0.05),
}


def test_every_preset_is_tested():
    named = set(ARCH_MODEL_INV_REGISTRY["transformer_xl"]) - {"transformer_xl"}
    assert named == {*PRESETS, "transformer_xl_tiny"}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    count, symbols = PRESETS[name]
    _, model = build_preset(name, symbols)
    ours = sum(p.numel() for p in model.parameters())
    if name == "transformer_xl_enwik8_18l":
        assert abs(ours - count) < 0.01 * count, ours
    else:
        assert ours == count


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_set_what_is_published(name):
    layers, width, heads, head_dim, inner, bands, dropout, attention = PUBLISHED[name]
    cfg, model = build_preset(name, PRESETS[name][1])
    decoder = model.decoder
    assert len(decoder.layers) == layers
    for layer in decoder.layers:
        assert (layer.self_attn.num_heads, layer.self_attn.head_dim) == (heads, head_dim)
        assert layer.feed_forward.fc1.weight.shape == (inner, width)
        assert layer.feed_forward.dropout.p == layer.dropout.p == dropout
        assert layer.self_attn.dropout == attention
        assert not layer.normalize_before
    dropouts = (decoder.embed_dropout, decoder.output_dropout, decoder.positions.dropout)
    assert [d.p for d in dropouts] == [dropout] * 3
    if bands is None:
        assert decoder.output_projection.weight is decoder.embed_tokens.weight
        assert decoder.output_projection.bias is not None
    else:
        options = (cfg.adaptive_input_cutoff, cfg.adaptive_input_factor)
        assert options == (cfg.adaptive_softmax_cutoff, cfg.adaptive_softmax_factor) == bands
        assert (cfg.tie_adaptive_weights, cfg.tie_adaptive_proj, cfg.output_bias) == (True,) * 3


def test_the_ptb_preset_drops_as_published():
    decoder = build_preset("transformer_xl_ptb", 10_000)[1].decoder
    layer = decoder.layers[0]
    locked = (decoder.embed_dropout, decoder.output_dropout, layer.dropout)
    locked = (*locked, layer.feed_forward.dropout)
    assert all(isinstance(dropout, LockedDropout) for dropout in locked)
    assert [dropout.p for dropout in locked] == [0.6, 0.5, 0.2, 0.2]
    assert (decoder.word_dropout.p, layer.self_attn.dropout) == (0.2, 0.2)


def test_presets_differ_from_one_another_and_from_the_defaults():
    plain = TransformerXLConfig(**SEGMENTS)
    seen = [dataclasses.asdict(plain)]
    for name in ARCH_MODEL_INV_REGISTRY["transformer_xl"]:
        if name == "transformer_xl":
            continue
        cfg = TransformerXLConfig(**SEGMENTS)
        blank = type("Namespace", (), {})()
        ARCH_CONFIG_REGISTRY[name](blank)
        for option, value in vars(blank).items():
            setattr(cfg, option, value)
        options = dataclasses.asdict(cfg)
        if name == "transformer_xl_text8_large":
            # the paper: "the best model and the same hyper-parameters on enwik8"
            assert options in seen
            continue
        assert options not in seen, name
        seen.append(options)


def test_a_preset_leaves_what_the_command_line_says():
    blank = type("Namespace", (), {})()
    blank.decoder_layers = 2
    ARCH_CONFIG_REGISTRY["transformer_xl_enwik8_base"](blank)
    assert (blank.decoder_layers, blank.decoder_ffn_embed_dim) == (2, 2048)
