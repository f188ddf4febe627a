"""Memories in fairseq's transformers and in segment models: placement, padding, decoding."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_plugins.product_key_memory.memory import MemorySublayer
from fairseq_plugins.product_key_memory.model import LANGUAGE_MODELS
from scripts.docs import tables
from tests import tiny
from tests.product_key_memory.tiny import (
    BUILDERS,
    build,
    inputs_of,
    memories,
    padded,
    score,
    tiny_language_model,
)
from tests.recipes import HYDRA

PLACES = pytest.mark.parametrize(
    "place",
    [{}, {"memory_interleave": True}, {"memory_parallel": True}],
    ids=["replaced", "interleaved", "parallel"],
)
NORMS = pytest.mark.parametrize("pre_norm", [False, True], ids=["post-norm", "pre-norm"])
MODELS = pytest.mark.parametrize("kind", BUILDERS)


def add(x, sublayer, layer_norm, pre_norm):
    """Add a residual sublayer, with the norm before or after it."""
    return x + sublayer(layer_norm(x)) if pre_norm else layer_norm(x + sublayer(x))


def with_memory(layer, attended, feed_forward, place):
    """Compute the rest of a layer after its attention, from the equations."""
    (memory,) = memories(layer)
    sublayers, x = [memory], attended
    if "memory_parallel" in place:
        sublayers = [lambda x: feed_forward(x) + memory(x)]
    elif "memory_interleave" in place:
        sublayers = [feed_forward, memory]
    # fairseq's layers have the second name, segment models the third
    names = ("final_layer_norm", "memory_layer_norm", "added_layer_norm")
    norms = [norm for name in names if (norm := getattr(layer, name, None)) is not None]
    for sublayer, norm in zip(sublayers, norms, strict=True):
        x = add(x, sublayer, norm, layer.normalize_before)
    return x


@pytest.mark.parametrize("kind", BUILDERS)
@PLACES
@NORMS
def test_a_layer_is_what_is_written_out(kind, place, pre_norm):
    part = "encoder" if kind == "translation" else "decoder"
    options = {f"{part}_normalize_before": pre_norm, f"{part}_ffn_embed_dim": 24}
    model, x = build(kind, **place, **options).eval(), torch.randn(5, 3, 16)
    layer, mask = getattr(model, part).layers[1], None
    if segments := kind in ("transformer_xl", "all_attention"):
        positions = model.decoder.compute_positions(2)[1]
        found, _ = layer(x, positions)
    elif part == "encoder":
        found = layer(x, None)
    else:
        mask = torch.triu(torch.full((5, 5), float("-inf")), 1)
        found, *_ = layer(x, self_attn_mask=mask)

    def attention(x):
        if segments:
            return layer.self_attn(x, positions, None)[0]
        return layer.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0]

    def feed_forward(x):
        if segments:
            return layer.feed_forward(x)
        # use only the weights: calling the modules would also run a memory beside them
        inner = torch.relu(F.linear(x, layer.fc1.weight, layer.fc1.bias))
        return F.linear(inner, layer.fc2.weight, layer.fc2.bias)

    attended = add(x, attention, layer.self_attn_layer_norm, pre_norm)
    torch.testing.assert_close(found, with_memory(layer, attended, feed_forward, place))


def test_memories_stand_in_the_layers_that_are_named():
    # memories are added to layers without feed-forward sublayers
    for interleave in (False, True):
        model = build("all_attention", memory_layers="1,3", memory_interleave=interleave)
        assert [len(memories(layer)) for layer in model.decoder.layers] == [1, 0, 1]
    # a memory replaces persistent vectors that have their own sublayer
    model = build("all_attention", persistent_variant="ff-attn")
    kinds = [type(layer.feed_forward).__name__ for layer in model.decoder.layers]
    assert kinds == ["SoftmaxFeedForward", "MemorySublayer", "SoftmaxFeedForward"]
    # dropping layers in training does not change their numbers
    model = tiny_language_model(memory_layers="3", decoder_layerdrop=0.9)
    assert isinstance(model.decoder.layers[2].fc1, MemorySublayer)
    assert len(memories(model)) == 1


@MODELS
@PLACES
def test_padding_changes_nothing(kind, place):
    """Padding affects neither scores nor the statistics of batch norm."""

    def pass_over(extra):
        model = build(kind, memory_query_batch_norm=True, **place).train()
        scores = score(model, padded(7, 4, 5, width=7 + extra))
        means = [memory.query_network.batch_norm.running_mean for memory in memories(model)]
        assert all(mean.any() for mean in means)
        real = [row[:length] for row, length in zip(scores, (7, 4, 5), strict=True)]
        return real, means

    torch.testing.assert_close(pass_over(3), pass_over(0))


@MODELS
@PLACES
def test_incremental_decoding_is_a_full_pass(kind, place):
    model = build(kind, **place).eval()
    batch, state, options = tiny.tokens(3, 9), {}, {}
    full = score(model, batch)
    if kind == "translation":
        source, lengths, _ = inputs_of(model, batch)
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
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}


SHARED = {"memory_parallel": True, "memory_share_values": True, "memory_output_gate": True}


@MODELS
@pytest.mark.parametrize(
    "place", [{}, {"memory_interleave": True}, {"memory_parallel": True}, SHARED]
)
def test_recomputed_activations_and_hidden_values_change_no_gradient(kind, place):
    expected = gradients(kind, False, memory_optimizer="adam", **place)
    tables = [name for name in expected if name.endswith("memory.values")]
    assert len(tables) == (2 if kind == "translation" and place is not SHARED else 1)
    for optimizer in ("adam", "adam_with_memory"):
        found = gradients(kind, True, memory_optimizer=optimizer, **place)
        torch.testing.assert_close(found, expected)


@MODELS
def test_an_update_without_the_values_is_refused(kind):
    model = build(kind, memory_optimizer="adam_with_memory")
    # one update of two batches
    for _ in range(2):
        model.set_num_updates(7)
        score(model, tiny.tokens(2, 4)).square().sum().backward()
    with pytest.raises(ValueError, match=r"--optimizer adam_with_memory .*--fp16-no-flatten-grads"):
        model.set_num_updates(8)
    for memory in memories(model):
        memory.values.grad = None
    model.set_num_updates(8)


@pytest.mark.filterwarnings(HYDRA)
@pytest.mark.parametrize("arch", LANGUAGE_MODELS)
def test_presets_are_the_papers_models(arch):
    # section 4.5
    places = {"ablation": [5], "tiny": [3]}.get(arch.split("_")[-1], [])
    task = ("--task", "language_modeling", "--tokens-per-sample", "512")
    cfg = convert_namespace_to_omegaconf(tables.parse(["DATA", *task, "--arch", arch]))
    # a model that kept omegaconf's generated classes could not be pickled
    decoder = pickle.loads(pickle.dumps(tables.build(cfg.model, 60_000))).decoder
    found = {number: memories(layer) for number, layer in enumerate(decoder.layers, start=1)}
    assert [number for number, of_layer in found.items() if of_layer] == places
    for (memory,) in filter(None, found.values()):
        assert (memory.heads, memory.knn) == (4, 8 if "tiny" in arch else 32)
    assert not any(layer.normalize_before for layer in decoder.layers)
    # learned positions, tied embeddings
    assert decoder.embed_positions.weight.requires_grad
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
