"""Memories from options, in fairseq's layers and in segment models."""

import copy
import dataclasses

import pytest
import torch
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from fairseq.optim.fp16_optimizer import FP16Optimizer

from fairseq_plugins.all_attention.adaptive_span import ALL_HEADS
from fairseq_plugins.product_key_memory.fairseq_layers import MemoryBuilder, parse_memory_layers
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import lazy_values
from fairseq_plugins.product_key_memory.options import MemoryLayersOptions
from fairseq_plugins.segment_language_model.network import Encoding
from fairseq_plugins.segment_language_model.prompt_readers import SegmentReader
from tests import tiny
from tests.product_key_memory.layer import build_memory
from tests.product_key_memory.tiny import (
    BUILDERS,
    build,
    memories,
    model_inputs,
    padded,
    score,
    tiny_language_model,
)

PLACES = pytest.mark.parametrize(
    "position", [{}, {"memory_interleave": True}], ids=["replaced", "interleaved"]
)
NORMS = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
MODELS = pytest.mark.parametrize("kind", BUILDERS)


def fairseqs_layer(layer, cfg):
    """Return fairseq's layer with the weights of ``layer``; its memory may be the feed-forward."""
    if isinstance(layer, TransformerEncoderLayerBase):
        plain = TransformerEncoderLayerBase(cfg)
    else:
        plain = TransformerDecoderLayerBase(cfg, layer.encoder_attn is None)
    plain.load_state_dict(layer.state_dict(), strict=False)
    if not layer.interleave:
        plain.fc1, plain.fc2 = layer.memory, torch.nn.Identity()
        plain.activation_fn = plain.activation_dropout_module = torch.nn.Identity()
    return plain.train(layer.training)


def follow(layer, x, dropout):
    """Compute the sublayer of an interleaved memory."""
    if layer.normalize_before:
        return x + dropout(layer.memory(layer.memory_layer_norm(x)))
    return layer.memory_layer_norm(x + dropout(layer.memory(x)))


SCALES = {"scale_attn": True, "scale_heads": True, "scale_resids": True}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "part", "options"),
    [
        ("translation", "encoder", {}),
        ("translation", "decoder", {"decoder_memory_layers": "2"}),
        ("translation", "decoder", {"decoder_memory_layers": "2", "cross_self_attention": True}),
        ("language model", "decoder", {}),
        ("language model", "decoder", SCALES),
    ],
)
@PLACES
@NORMS
def test_a_layer_equals_fairseqs_except_for_its_memory(
    kind, part, options, position, pre_norm, training
):
    """Attention of all kinds, dropout, masks, scales, and the weights that it returns."""
    options = {f"{part}_normalize_before": pre_norm, **options, **position}
    model = build(kind, dropout=0.3, attention_dropout=0.2, **options).train(training)
    stack = getattr(model, part)
    layer = stack.layers[1]
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, inputs = torch.randn(5, 3, 16), {}
    if part == "encoder":
        # a mask that hides nothing: fairseq's layer does not tell its sublayers what is padding
        inputs["encoder_padding_mask"] = torch.zeros(3, 5) > 0
    else:
        inputs["encoder_out"] = torch.randn(4, 3, 16) if kind == "translation" else None
        inputs["self_attn_mask"] = torch.triu(torch.full((5, 5), float("-inf")), 1)
        inputs["need_head_weights"] = True
    results = []
    for each in (layer, fairseqs_layer(layer, stack.cfg)):
        torch.manual_seed(3)
        output = each(x, **inputs)
        results.append([output] if part == "encoder" else [*output])
    if position:
        results[1][0] = follow(layer, results[1][0], layer.dropout_module)
    for ours, fairseqs in zip(*results, strict=True):
        assert fairseqs is None if ours is None else torch.equal(ours, fairseqs)


@pytest.mark.parametrize("pre_norm", [False, True])
def test_a_segment_layer_has_its_memory_in_place_of_feed_forward_or_after_it(pre_norm):
    for kind in ("transformer_xl", "all_attention"):
        options = {"decoder_normalize_before": pre_norm} if kind == "transformer_xl" else {}
        network = build(kind, memory_interleave=True, **options).decoder.network
        layer, x = network.layers[1], torch.randn(3, 5, 16)
        groups = ALL_HEADS if kind == "all_attention" else None
        positions = Encoding(network.positions(4, x), groups)
        plain = copy.deepcopy(layer)
        plain.memory = None
        expected = follow(layer, plain(x, positions)[0], layer.dropout)
        torch.testing.assert_close(layer(x, positions)[0], expected)


def test_a_layer_uses_all_its_parameters():
    """Otherwise DistributedDataParallel would stop; --scale-fc adds a norm between fc1 and fc2."""
    layer = build("language model", scale_fc=True).decoder.layers[1]
    layer(torch.randn(5, 3, 16))[0].square().sum().backward()
    assert [name for name, weight in layer.named_parameters() if weight.grad is None] == []


def test_memories_are_in_the_layers_that_the_option_names():
    # memories are added to layers without feed-forward sublayers
    for interleave in (False, True):
        model = build("all_attention", memory_layers="1,3", memory_interleave=interleave)
        assert [len(memories(layer)) for layer in model.decoder.network.layers] == [1, 0, 1]
    # a memory replaces feed-forward sublayers, also persistent vectors that are one
    for kind, options in (
        ("transformer_xl", {}),
        ("all_attention", {"persistent_variant": "ff-attn"}),
    ):
        layers = build(kind, **options).decoder.network.layers
        assert [isinstance(layer.feed_forward, ProductKeyMemory) for layer in layers] == [0, 1, 0]
    # dropping layers in training does not change their numbers
    model = tiny_language_model(memory_layers="3", decoder_layerdrop=0.9)
    assert len(memories(model.decoder.layers[2])) == len(memories(model)) == 1


@MODELS
@PLACES
def test_incremental_decoding_equals_a_full_pass(kind, position):
    model = build(kind, **position).eval()
    batch, state, options = tiny.tokens(3, 9), {}, {}
    full = score(model, batch)
    if kind == "translation":
        source, lengths, _ = model_inputs(model, batch)
        options["encoder_out"] = model.encoder(source, src_lengths=lengths)
    reader = SegmentReader(model, segment=9) if hasattr(model.decoder, "network") else None
    for end in range(1, 10):
        if reader is None:
            step, _ = model.decoder(batch[:, :end], incremental_state=state, **options)
            torch.testing.assert_close(step[:, -1], full[:, end - 1])
        else:
            (step,) = reader.read(batch[:, :end])
            torch.testing.assert_close(step[:, -1], full[:, end - 1].log_softmax(-1))


def train_once(kind, padding=0, **options):
    """Return the gradients of all weights, also hidden ones, and the statistics of batch norms."""
    model = build(kind, memory_query_batch_norm=True, **options).train()
    scores = score(model, padded(7, 4, 5, width=7 + padding))
    real = [row[:length] for row, length in zip(scores, (7, 4, 5), strict=True)]
    # another pass before the backward pass must not change the padding of the first one
    with torch.no_grad():
        score(model, padded(4, 7, 7))
    torch.cat(real).square().sum().backward()
    means = {name: x for name, x in model.named_buffers() if name.endswith("running_mean")}
    assert len(means) == len(memories(model))
    learned = {
        name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None
    }
    return learned | means


SHARED = {"memory_interleave": True, "memory_share_values": True, "memory_output_gate": True}


@MODELS
@pytest.mark.parametrize("position", [{}, {"memory_interleave": True}, SHARED])
def test_padding_checkpointing_and_hidden_values_change_no_gradient(kind, position):
    expected = train_once(kind, **position)
    tables = [name for name in expected if name.endswith("values.weight")]
    assert len(tables) == (2 if kind == "translation" and position is not SHARED else 1)
    recomputed = {"checkpoint_activations": True, **position}
    for options in (
        {"padding": 3, **position},
        {"memory_optimizer": "adam", **recomputed},
        {"memory_optimizer": "adam_with_memory", **recomputed},
    ):
        learned = train_once(kind, **options)
        torch.testing.assert_close(learned, expected, rtol=1e-4, atol=1e-4)


# --- memories from options


def build_from_options(width=8, **choices):
    small = {"slots": 25, "knn": 2, "query_dim": 4, "optimizer": None, "layers": "1"}
    options = {f"memory_{name}": value for name, value in {**small, **choices}.items()}
    return MemoryBuilder(MemoryLayersOptions(**options), width, 3)(1)


@pytest.mark.parametrize(
    ("text", "numbers"), [(None, []), ("", []), ("3", [3]), ("12, 6", [6, 12]), (7, [7])]
)
def test_parse_memory_layers_counts_from_1(text, numbers):
    assert parse_memory_layers(text, 12, "--memory-layers") == numbers


def test_memory_builder_passes_on_every_option():
    """Each option gets a value of its own."""
    same = {"slots": 20, "knn": 7, "value_dim": 9, "keys": "flat", "kernel": "plain"}
    choices = {
        **{"heads": 3, "query_dim": 6, "query_hidden_dims": "8,10", "query_dropout": 0.1},
        **{"query_batch_norm": True, "input_dropout": 0.2},
        **{"output_gate": True, "value_dropout": 0.3},
    }
    query = {"hidden_dims": (8, 10), "batch_norm": True}
    query |= {"dropout": 0.1, "input_dropout": 0.2}
    output = {"gate": True, "dropout": 0.3}
    built = build_from_options(5, **same, **choices)
    expected = build_memory(5, 3, 6, query, output, **same)
    shapes = [
        {name: x.shape for name, x in memory.state_dict().items()} for memory in (built, expected)
    ]
    assert shapes[0] == shapes[1]
    # modules with their sizes and rates
    assert str(built) == str(expected)
    assert (built.knn, built.values.kernel) == (7, "plain")
    model_options = {"layers", "optimizer", "share_values", "interleave"}
    names = {option.name for option in dataclasses.fields(MemoryLayersOptions)} - {"_name"}
    assert names == {f"memory_{name}" for name in model_options | same.keys() | choices.keys()}


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("optimizer", [None, "adam", "adam_with_memory"])
def test_only_adam_with_memory_gets_the_values(optimizer, keys, caplog):
    """It also finds them through the copies in single precision that --bf16 makes."""
    memory = build_from_options(optimizer=optimizer, keys=keys).bfloat16()
    hidden = optimizer == "adam_with_memory"
    assert ("--optimizer adam updates all" in caplog.text) == (optimizer == "adam")
    assert memory.values.weight.requires_grad != hidden
    seen = [parameter for parameter in memory.parameters() if parameter.requires_grad]
    for parameters in (seen, FP16Optimizer.build_fp32_params(None, seen, flatten=False)):
        assert lazy_values(parameters) == [memory.values] * hidden
    # a copy is trained alike
    twin = copy.deepcopy(memory)
    assert lazy_values(twin.parameters()) == [twin.values] * hidden
