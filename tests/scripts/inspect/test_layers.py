"""What is shown of a layer gives what the layer computed."""

import pytest
import torch
from fairseq.modules import MultiheadAttention
from torch import nn

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.all_attention.attention import (
    IN_ATTENTION,
    AllAttention,
    project_spanned_positions,
)
from fairseq_plugins.all_attention.persistent_vectors import SoftmaxFeedForward
from fairseq_plugins.product_key_memory.memory import MemoryOutput, ProductKeyMemory
from fairseq_plugins.segment_language_model.attention import PositionBiases, RelativeAttention
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.network import FeedForward, SegmentLayer, SegmentNetwork
from fairseq_plugins.segment_language_model.positions import (
    LearnedRelativePositions,
    RelativeKeyProjection,
    SinusoidalRelativePositions,
)
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from fairseq_plugins.weighted_transformer.layers import WeightedLinear
from scripts.inspect._layers import EQUATIONS, record

WIDTH, HEADS, TOKENS = 16, 4, 30


def read(model, *inputs, **options):
    """Call a model; return its output, and what each layer read with what it returned."""
    outputs, reads = {}, {}

    def keep(name):
        def hook(module, inputs, output):
            outputs[name] = output[0] if isinstance(output, tuple) else output

        return hook

    for name, module in model.named_modules():
        if isinstance(module, tuple(EQUATIONS)):
            module.register_forward_hook(keep(name))
    model.eval()
    with record(model, lambda name, module, layer_reads: reads.update({name: layer_reads})):
        output = model(*inputs, **options)
    assert reads.keys() == outputs.keys() != set()
    return output, [(reads[name], outputs[name]) for name in reads]


def assert_reads_give_outputs(reads):
    for layer_reads, output in reads:
        torch.testing.assert_close(layer_reads.output, output, rtol=0, atol=1e-5)


def text(streams=2, length=TOKENS, seed=3):
    return torch.randn(streams, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def read_segments(network, *lengths):
    """Read segments one after another, each with the past of those before; return all reads."""
    past, reads, start = None, [], 0
    for length in lengths:
        (_, past), segment_reads = read(network, text()[:, start : start + length], past)
        assert_reads_give_outputs(segment_reads)
        reads += segment_reads
        start += length
    return reads


@pytest.mark.parametrize("clamp_len", [None, 5])
@pytest.mark.parametrize("window", [Window(0), Window(0, 6)])
def test_relative_attention_gives_the_output(window, clamp_len):
    torch.manual_seed(1)
    layers = []
    for _ in range(2):
        biases = PositionBiases(HEADS, WIDTH // HEADS)
        for parameter in biases.parameters():
            nn.init.normal_(parameter)
        attention = RelativeAttention(
            WIDTH, HEADS, window, RelativeKeyProjection(WIDTH, HEADS), biases
        )
        feed_forward = FeedForward(WIDTH, 24, nn.Identity())
        layers.append(SegmentLayer(WIDTH, attention, feed_forward, nn.Identity()))
    network = SegmentNetwork(layers, 9, SinusoidalRelativePositions(WIDTH, clamp_len))
    reads = read_segments(network, 7, 11, 12)
    for layer_reads, _ in reads:
        torch.testing.assert_close(
            layer_reads.keys.sum(-1), torch.ones(layer_reads.keys.shape[:-1])
        )


@pytest.mark.parametrize("spans", [None, [0.0, 0.3, 0.9, 0.1]], ids=["fixed", "learned"])
@pytest.mark.parametrize("variant", IN_ATTENTION)
def test_all_attention_gives_the_output(variant, spans, monkeypatch):
    # heads with different spans are computed apart
    monkeypatch.setattr("fairseq_plugins.all_attention.adaptive_span.GROUP_COST", 0)
    torch.manual_seed(1)
    context_heads = HEADS // 2 if variant == "head-split" else HEADS
    layers = []
    for _ in range(2):
        span = None
        if spans is not None:
            span = AdaptiveSpan(context_heads, 20, ramp=3)
            span.value.data = torch.tensor(spans[:context_heads])
        attention = AllAttention(
            WIDTH, HEADS, Window(1, 20), num_persistent=5, variant=variant, span=span
        )
        layers.append(SegmentLayer(WIDTH, attention, None, nn.Identity()))
    positions = LearnedRelativePositions(20, WIDTH // HEADS)
    network = SegmentNetwork(layers, 20, positions, project=project_spanned_positions)
    reads = read_segments(network, 7, 11, 12)
    if variant == "all":
        for layer_reads, _ in reads:
            total = layer_reads.keys.sum(-1) + layer_reads.vectors.sum(-1)
            torch.testing.assert_close(total, torch.ones_like(total))


def test_softmax_feed_forward_gives_the_output():
    torch.manual_seed(1)
    _, reads = read(SoftmaxFeedForward(7, WIDTH), text())
    assert_reads_give_outputs(reads)


@pytest.mark.parametrize("weighted", [False, True])
def test_attention_to_a_source_gives_the_output(weighted):
    torch.manual_seed(1)
    options = {"kdim": WIDTH, "vdim": WIDTH, "encoder_decoder_attention": True}
    attention = MultiheadAttention(WIDTH, HEADS, **options)
    if weighted:
        kappa = BranchWeights(HEADS, "kappa")
        attention.out_proj = WeightedLinear(WIDTH, WIDTH, kappa)
        attention.skip_embed_dim_check = True
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, :2] = True
    target, source = text(length=5).transpose(0, 1), text(length=6, seed=4).transpose(0, 1)
    (output, _), reads = read(
        attention, query=target, key=source, value=source, key_padding_mask=padding
    )
    assert_reads_give_outputs(reads)
    ((layer_reads, _),) = reads
    assert layer_reads.keys[:, 1, :, :2].abs().max() == 0
    if weighted:
        # Σ κ_i head_i W^{O_i} + b
        values = attention.v_proj(source).unflatten(-1, (HEADS, -1)).permute(2, 1, 0, 3)
        heads = layer_reads.keys @ values  # (M, B, T, h)
        matrices = attention.out_proj.weight.unflatten(1, (HEADS, -1)).permute(1, 2, 0)
        branches = heads @ matrices.unsqueeze(1)  # (M, B, T, d)
        summed = torch.einsum("m,mbtd->tbd", kappa(), branches) + attention.out_proj.bias
        torch.testing.assert_close(summed, output, rtol=0, atol=1e-5)


def test_attention_within_a_text_gives_the_output():
    torch.manual_seed(1)
    attention = MultiheadAttention(WIDTH, HEADS, self_attention=True)
    x = text().transpose(0, 1)
    future = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)
    _, reads = read(attention, query=x, key=x, value=x, attn_mask=future)
    assert_reads_give_outputs(reads)


@pytest.mark.parametrize("keys", ["product", "flat"])
@pytest.mark.parametrize("value_dim", [WIDTH, 12])
def test_memory_gives_the_output(keys, value_dim):
    torch.manual_seed(1)
    output = MemoryOutput(WIDTH, value_dim, norm=True, gate=True)
    memory = ProductKeyMemory(WIDTH, 49, 2, 3, 8, value_dim, keys, output=output)
    padding = torch.zeros(2, TOKENS, dtype=torch.bool)
    padding[0, -4:] = True
    for mask in (None, padding):
        _, reads = read(memory, text(), mask)
        assert_reads_give_outputs(reads)
        ((layer_reads, _),) = reads
        tokens = 2 * TOKENS - (0 if mask is None else 4)
        assert layer_reads.slots.shape == layer_reads.slot_weights.shape == (tokens, 2, 3)
