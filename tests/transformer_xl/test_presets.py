"""The presets of Transformer-XL: what is published, parameter for parameter."""

import dataclasses

import fairseq.models
import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY
from omegaconf import OmegaConf

from fairseq_plugins.transformer_xl.locked_dropout import LockedDropout
from fairseq_plugins.transformer_xl.model import TransformerXLConfig, TransformerXLLanguageModel
from tests.tiny import SEGMENTS, dictionary


def build_preset(name, symbols, **changes):
    """The model of a preset on the meta device, for ``symbols`` symbols, special ones included."""
    cfg = TransformerXLConfig(**SEGMENTS)
    blank = type("Namespace", (), {})()
    ARCH_CONFIG_REGISTRY[name](blank)
    for option, value in vars(blank).items():
        assert hasattr(cfg, option), f"{name} sets {option}, which is no option"
        setattr(cfg, option, value)
    cfg = dataclasses.replace(cfg, **changes)
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
    "transformer_xl_text8_base": (40_965_148, 28),
    "transformer_xl_text8_large": (277_051_420, 28),
    "transformer_xl_wt103_base": (151_107_538, 267_735),
    "transformer_xl_wt103_large": (285_170_506, 267_735),
    "transformer_xl_wt103_ablation": (128_000_000, 267_735),
    "transformer_xl_lm1b_base": (357_812_082, 793_471),
    "transformer_xl_lm1b_20l": (469_020_530, 793_471),
    "transformer_xl_lm1b_large": (841_295_982, 793_471),
    "transformer_xl_lm1b_ablation": (300_000_000, 793_471),
    "transformer_xl_ptb": (24_040_400, 10_000),
}
# layers, width, heads, head width, inner width; cutoffs and factor; dropout, attention dropout
PUBLISHED = {
    "transformer_xl_enwik8_base": (12, 512, 8, 64, 2048, None, 0.1, 0.0),
    "transformer_xl_enwik8_large": (24, 1024, 8, 128, 3072, None, 0.15, 0.15),
    "transformer_xl_text8_base": (12, 512, 8, 64, 2048, None, 0.1, 0.0),
    "transformer_xl_text8_large": (24, 1024, 8, 128, 3072, None, 0.15, 0.15),
    "transformer_xl_wt103_base": (16, 410, 10, 41, 2100, ("20000,40000,200000", 1), 0.1, 0.0),
    "transformer_xl_wt103_large": (18, 1024, 16, 64, 4096, ("20000,40000,200000", 4), 0.2, 0.2),
    "transformer_xl_lm1b_base": (18, 1024, 8, 128, 4096, ("60000,100000,640000", 4), 0.0, 0.0),
    "transformer_xl_lm1b_20l": (20, 1024, 8, 128, 6144, ("60000,100000,640000", 4), 0.0, 0.0),
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
    if count % 1_000_000 == 0:
        assert abs(ours - count) < 0.01 * count, ours
    else:
        assert ours == count


@pytest.mark.parametrize(
    ("name", "count"),
    [
        # 17 more pairs of u and v
        ("transformer_xl_wt103_large", 285_170_506 + 17 * 2 * 1024),
        # 23 more pairs, and two projections less
        ("transformer_xl_lm1b_large", 841_295_982 + 23 * 2 * 1280 - 2 * 1280**2),
    ],
)
def test_options_of_the_recipes_give_the_models_of_the_tensorflow_code(name, count):
    no_projection = name == "transformer_xl_lm1b_large"
    options = {"untie_r": True, "no_adaptive_head_proj": no_projection}
    _, model = build_preset(name, PRESETS[name][1], **options)
    assert sum(p.numel() for p in model.parameters()) == count


def test_the_tiny_preset_has_the_number_of_the_readme():
    _, model = build_preset("transformer_xl_tiny", 100)
    # 4 layers of q, k, v, o, W_kR, feed-forward with biases, norms; u, v; embeddings, output bias
    layer = 5 * 128 * 128 + 2 * 128 * 512 + 512 + 128 + 4 * 128
    count = 4 * layer + 2 * 128 + 100 * 128 + 100
    assert sum(p.numel() for p in model.parameters()) == count == 869_732


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
    # positions have none where it would drop nothing
    assert [0.0 if d is None else d.p for d in dropouts] == [dropout] * 3
    if bands is None:
        assert decoder.output_projection.weight is decoder.embed_tokens.weight
        assert decoder.output_projection.bias is not None
    else:
        options = (cfg.adaptive_input_cutoff, cfg.adaptive_input_factor)
        assert options == (cfg.adaptive_softmax_cutoff, cfg.adaptive_softmax_factor) == bands
        tied = (cfg.tie_adaptive_weights, cfg.tie_adaptive_proj, cfg.output_bias)
        assert tied == (True, "wt103" in name, True)


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
        if "text8" in name:
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


def test_a_checkpoint_from_before_keeps_its_tied_projections():
    name = "transformer_xl_lm1b_base"
    bands = {"adaptive_input": True, "adaptive_input_cutoff": "6", "adaptive_softmax_cutoff": "6"}
    tied = {"tie_adaptive_weights": True, "tie_adaptive_proj": True}
    saved = OmegaConf.create({"_name": name, **SEGMENTS, **bands, **tied})
    task = type("Task", (), {"source_dictionary": dictionary()})()
    with torch.device("meta"):
        fairseq.models.build_model(saved, task, from_checkpoint=True)
    found = (saved.tie_adaptive_proj, saved.no_adaptive_head_proj, saved.initial_values)
    assert found == (True, False, "pytorch")
