"""Memories from options, and their position in fairseq's layers and in segment models."""

import dataclasses

import pytest
import torch
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from fairseq.optim.fp16_optimizer import FP16Optimizer

from fairseq_plugins.fairseq_integration.memory_options import MemoryLayersOptions
from fairseq_plugins.fairseq_integration.parameters import update_rule
from fairseq_plugins.product_key_memory.fairseq_layers import MemoryBuilder, parse_memory_layers
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.product_key_memory.optimizer import LazyAdamRule
from fairseq_plugins.product_key_memory.search import FlatKeys
from tests import tiny
from tests.product_key_memory.tiny import (
    BUILDERS,
    build,
    memories,
    model_inputs,
    padded,
    score,
    tiny_language_model,
)


def build_from_options(numbers=(1,), width=8, **choices):
    """Build the memories of the layers ``numbers`` of 3."""
    small = {"slots": 25, "knn": 2, "query_dim": 4, "optimizer": None, "layers": "1,2,3"}
    options = {f"memory_{name}": value for name, value in {**small, **choices}.items()}
    builder = MemoryBuilder(MemoryLayersOptions(**options), width, 3)
    return [builder(number) for number in numbers]


@pytest.mark.parametrize(
    ("text", "numbers"), [(None, []), ("", []), ("3", [3]), ("12, 6", [6, 12]), (7, [7])]
)
def test_parse_memory_layers_counts_from_1(text, numbers):
    assert parse_memory_layers(text, 12, "--memory-layers") == numbers


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        *((text, "layers from 1 to 12, each once") for text in ("0", "3,13", "3,4,3")),
        *((text, "such as 6,12") for text in ("3;4", "3,", "2.5")),
    ],
)
def test_parse_memory_layers_names_option_value_and_remedy(text, remedy):
    with pytest.raises(ValueError, match=f"--memory-layers is '{text}': .*{remedy}"):
        parse_memory_layers(text, 12, "--memory-layers")


def test_memory_builder_refuses_widths_that_are_no_numbers():
    with pytest.raises(ValueError, match=r"--memory-query-hidden-dims is '8;9': .* 512,512"):
        build_from_options(query_hidden_dims="8;9")


def test_memory_builder_passes_on_every_option():
    """Each option gets a value of its own, and the memory is built with these values."""
    choices = {
        **{"slots": 20, "heads": 3, "knn": 7, "query_dim": 6, "value_dim": 9},
        **{"query_hidden_dims": "8,10", "query_batch_norm": True, "query_layer_norm": True},
        **{"query_dropout": 0.1, "input_dropout": 0.2, "value_dropout": 0.3},
        **{"keys": "flat", "kernel": "plain", "output_norm": True, "output_gate": True},
    }
    (memory,) = build_from_options(width=5, **choices)
    shapes = {name: tuple(parameter.shape) for name, parameter in memory.named_parameters()}
    assert shapes == {
        "query.layers.0.weight": (8, 5),
        "query.layers.0.bias": (8,),
        "query.layers.2.weight": (10, 8),
        "query.layers.2.bias": (10,),
        "query.layers.4.weight": (18, 10),
        "query.layers.4.bias": (18,),
        "query.batch_norm.weight": (18,),
        "query.batch_norm.bias": (18,),
        "query.layer_norm.weight": (6,),
        "query.layer_norm.bias": (6,),
        "keys.keys": (3, 20, 6),
        "values.weight": (20, 9),
        "output.norm.weight": (9,),
        "output.norm.bias": (9,),
        "output.gate.weight": (9, 5),
        "output.projection.weight": (5, 9),
    }
    rates = memory.query.dropout.p, memory.query.input_dropout.p, memory.output.dropout.p
    assert rates == (0.1, 0.2, 0.3)
    assert (memory.knn, memory.keys.kernel, memory.values.kernel) == (7, "plain", "plain")
    assert isinstance(memory.keys, FlatKeys)
    model_options = {"layers", "optimizer", "share_values", "interleave"}
    names = {option.name for option in dataclasses.fields(MemoryLayersOptions)} - {"_name"}
    assert names == {f"memory_{name}" for name in model_options | choices.keys()}


@pytest.mark.parametrize("share", [False, True])
def test_memory_builder_shares_values_if_asked_to(share):
    first, none, other = build_from_options((1, 4, 3), share_values=share, value_dim=4)
    assert none is None
    assert (other.values is first.values) == share
    assert other.keys is not first.keys


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("optimizer", [None, "adam", "adam_with_memory"])
def test_only_adam_with_memory_gets_the_values(optimizer, keys):
    """It also finds them through the copies in single precision that --bf16 makes."""
    (memory,) = build_from_options(optimizer=optimizer, keys=keys)
    memory.bfloat16()
    beside = optimizer == "adam_with_memory"
    assert memory.values.weight.requires_grad != beside
    seen = [parameter for parameter in memory.parameters() if parameter.requires_grad]
    copies = FP16Optimizer.build_fp32_params(None, seen, flatten=False)
    for parameters in (seen, copies):
        rules = [update_rule(parameter, LazyAdamRule) for parameter in parameters]
        assert [rule.values for rule in rules if rule is not None] == [memory.values] * beside


# --- layers

PLACES = pytest.mark.parametrize(
    "position", [{}, {"memory_interleave": True}], ids=["replaced", "interleaved"]
)
NORMS = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
MODELS = pytest.mark.parametrize("kind", BUILDERS)


def add(x, sublayer, layer_norm, pre_norm):
    """Add a residual sublayer, with the norm before or after it."""
    return x + sublayer(layer_norm(x)) if pre_norm else layer_norm(x + sublayer(x))


@pytest.mark.parametrize("kind", BUILDERS)
@PLACES
@NORMS
def test_a_layer_equals_its_sublayers(kind, position, pre_norm):
    part = "encoder" if kind == "translation" else "decoder"
    options = {f"{part}_normalize_before": pre_norm, f"{part}_ffn_embed_dim": 24}
    model, x = build(kind, **position, **options).eval(), torch.randn(5, 3, 16)
    (memory,) = memories(getattr(model, part))
    if segments := kind in ("transformer_xl", "all_attention"):
        network = model.decoder.network
        layer, (positions, *_) = (
            network.layers[1],
            network.project(network.layers[1:2], network.positions, x.size(1) - 1, x),
        )
        output, _ = layer(x, positions)
    else:
        layer = getattr(model, part).layers[1]
        mask = torch.triu(torch.full((5, 5), float("-inf")), 1) if part == "decoder" else None
        output = layer(x, None) if mask is None else layer(x, self_attn_mask=mask)[0]

    def attention(x):
        if segments:
            return layer.self_attn(x, positions, None)[0]
        return layer.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0]

    def feed_forward(x):
        if segments:
            return layer.feed_forward(x)
        return layer.fc2(torch.relu(layer.fc1(x)))

    x = add(x, attention, layer.self_attn_layer_norm, pre_norm)
    if position:
        x = add(x, feed_forward, layer.final_layer_norm, pre_norm)
        x = add(x, memory, layer.memory_layer_norm, pre_norm)
    else:
        x = add(x, memory, layer.final_layer_norm, pre_norm)
    torch.testing.assert_close(output, x)


def fairseqs_layer(layer, cfg):
    """Return fairseq's layer with the weights of ``layer``, and its memory as feed-forward."""
    if isinstance(layer, TransformerEncoderLayerBase):
        plain = TransformerEncoderLayerBase(cfg)
    else:
        plain = TransformerDecoderLayerBase(cfg, layer.encoder_attn is None)
    plain.load_state_dict(layer.state_dict(), strict=False)
    plain.fc1, plain.fc2 = layer.memory, torch.nn.Identity()
    plain.activation_fn = plain.activation_dropout_module = torch.nn.Identity()
    return plain.train(layer.training)


SCALES = {"scale_attn": True, "scale_heads": True, "scale_resids": True}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("kind", "part", "options"),
    [
        ("translation", "encoder", {}),
        ("translation", "decoder", {"decoder_memory_layers": "2"}),
        ("language model", "decoder", {}),
        ("language model", "decoder", SCALES),
    ],
)
@NORMS
def test_a_layer_equals_fairseqs_except_for_its_memory(kind, part, options, pre_norm, training):
    """Attention of all kinds, dropout, masks, scales, and the weights that it returns."""
    norms = {f"{part}_normalize_before": pre_norm}
    model = build(kind, dropout=0.3, attention_dropout=0.2, **norms, **options).train(training)
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
        results.append((output,) if part == "encoder" else output)
    for ours, fairseqs in zip(*results, strict=True):
        assert fairseqs is None if ours is None else torch.equal(ours, fairseqs)


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
    # a memory replaces persistent vectors that have their own sublayer
    model = build("all_attention", persistent_variant="ff-attn")
    layers = model.decoder.network.layers
    assert [isinstance(layer.feed_forward, ProductKeyMemory) for layer in layers] == [0, 1, 0]
    # dropping layers in training does not change their numbers
    model = tiny_language_model(memory_layers="3", decoder_layerdrop=0.9)
    assert len(memories(model.decoder.layers[2])) == len(memories(model)) == 1


@MODELS
@PLACES
def test_padding_changes_nothing(kind, position):
    """Padding affects neither scores nor the statistics of batch norm."""

    def pass_over(extra):
        model = build(kind, memory_query_batch_norm=True, **position).train()
        scores = score(model, padded(7, 4, 5, width=7 + extra))
        means = [memory.query.batch_norm.running_mean for memory in memories(model)]
        assert all(mean.any() for mean in means)
        real = [row[:length] for row, length in zip(scores, (7, 4, 5), strict=True)]
        return real, means

    torch.testing.assert_close(pass_over(3), pass_over(0))


@MODELS
@PLACES
def test_incremental_decoding_equals_a_full_pass(kind, position):
    model = build(kind, **position).eval()
    batch, state, options = tiny.tokens(3, 9), {}, {}
    full = score(model, batch)
    if kind == "translation":
        source, lengths, _ = model_inputs(model, batch)
        options["encoder_out"] = model.encoder(source, src_lengths=lengths)
    for end in range(1, 10):
        step, _ = model.decoder(batch[:, :end], incremental_state=state, **options)
        torch.testing.assert_close(step[:, -1], full[:, end - 1])


def gradients(kind, checkpoint, **options):
    """Return gradients by parameter name, including those of values kept beside autograd."""
    model = build(kind, checkpoint_activations=checkpoint, memory_query_batch_norm=True, **options)
    loss = score(model.train(), padded(7, 4)).square().sum()
    # another pass before the backward pass must not change the padding of the first one
    with torch.no_grad():
        score(model, padded(4, 7))
    loss.backward()
    learned = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.to_dense() if g.is_sparse else g for name, g in learned.items()}


SHARED = {"memory_interleave": True, "memory_share_values": True, "memory_output_gate": True}


@MODELS
@pytest.mark.parametrize("position", [{}, {"memory_interleave": True}, SHARED])
def test_checkpointing_and_hidden_values_change_no_gradient(kind, position):
    expected = gradients(kind, False, memory_optimizer="adam", **position)
    tables = [name for name in expected if name.endswith("values.weight")]
    assert len(tables) == (2 if kind == "translation" and position is not SHARED else 1)
    for optimizer in ("adam", "adam_with_memory"):
        torch.testing.assert_close(
            gradients(kind, True, memory_optimizer=optimizer, **position), expected
        )


@MODELS
def test_a_model_refuses_an_optimizer_that_skips_its_values(kind):
    model = build(kind, memory_optimizer="adam_with_memory")
    # one update of two batches
    for _ in range(2):
        model.set_num_updates(7)
        score(model, tiny.tokens(2, 4)).square().sum().backward()
    with pytest.raises(ValueError, match=r"--optimizer adam_with_memory .*--fp16-no-flatten-grads"):
        model.set_num_updates(8)
    for memory in memories(model):
        memory.values.weight.grad = None
    model.set_num_updates(8)
