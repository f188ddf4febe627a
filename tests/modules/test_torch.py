"""Layers under PyTorch's own tools: what docs/layers.md says of them, and their errors."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.modules import (
    AllAttentionBlock,
    ProductKeyMemory,
    SinusoidalRelativePositions,
    TransformerXLBlock,
)

WIDTH, MEMORY, SEGMENTS = 16, 6, 3
BLOCKS = {
    "transformer-xl": lambda: TransformerXLBlock(WIDTH, 2, 24, MEMORY),
    "all-attention": lambda: AllAttentionBlock(WIDTH, 2, 5, MEMORY),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def build(name, seed=1):
    torch.manual_seed(seed)
    block = BLOCKS[name]().double()
    for parameter in block.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return block


def memory_layer():
    torch.manual_seed(1)
    return ProductKeyMemory(WIDTH, slots=16, heads=2, knn=3, query_dim=4)


def segments(streams=2, length=4):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(SEGMENTS, streams, length, WIDTH, generator=generator, dtype=torch.float64)


def read(call, block, grad=True):
    """Outputs of segments after one another, and the gradients of their squares."""
    memory, outputs = None, []
    with torch.set_grad_enabled(grad):
        for x in segments():
            y, memory = call(x.requires_grad_(grad), memory)
            outputs.append(y)
    if not grad:
        return outputs
    loss = sum(y.square().sum() for y in outputs)
    loss.backward()
    gradients = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    block.zero_grad()
    return [y.detach() for y in outputs] + gradients


@every_block
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_blocks_have_the_same_gradients(name, use_reentrant):
    block = build(name)

    def recomputed(x, memory):
        return checkpoint(block, x, memory, use_reentrant=use_reentrant)

    torch.testing.assert_close(read(recomputed, block), read(block, block))


@every_block
def test_a_memory_made_without_gradients_trains_as_any_other(name):
    block, (first, second, _) = build(name), segments()
    found = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            memory = block(first)[1]
        loss = block(second, memory)[0].square().sum()
        found.append(torch.autograd.grad(loss, [*block.parameters()], materialize_grads=True))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    with torch.no_grad():
        memory = block.eval()(first)[1]
    for training in (True, False):
        with pytest.raises(ValueError, match=r"^`past` holds keys and values, from which `k_proj`"):
            block.train(training)(second, memory)


@every_block
def test_compiled_blocks_compute_the_same(name):
    block = build(name)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(read(compiled, block), read(block, block))
    block.eval()
    torch.testing.assert_close(read(compiled, block, grad=False), read(block, block, grad=False))


@every_block
def test_exported_blocks_compute_the_same(name):
    block, (first, second, _) = build(name).eval(), segments()
    with torch.no_grad():
        begin = torch.export.export(block, (first,)).module()
        y, memory = begin(first)
        torch.testing.assert_close(y, block(first)[0])
        go_on = torch.export.export(block, (second, memory)).module()
        expected = block(second, block(first)[1])[0]
        torch.testing.assert_close(go_on(second, memory)[0], expected)


@every_block
@pytest.mark.parametrize("training", [True, False])
def test_a_memory_is_saved_and_loaded_without_code(name, training):
    block, (first, second, _) = build(name).train(training), segments()
    with torch.set_grad_enabled(training):
        memory = block(first)[1]
        file = io.BytesIO()
        torch.save(memory, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        for kept in (loaded, copy.deepcopy(memory)):
            assert torch.equal(block(second, kept)[0], block(second, memory)[0])


@every_block
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cast_blocks_compute_in_that_precision(name, dtype):
    block = build(name)
    exact = read(block, block, grad=False)
    block.to(dtype)
    outputs, memory = [], None
    with torch.no_grad():
        for x in segments():
            y, memory = block(x.to(dtype), memory)
            outputs.append(y)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    for one, other in zip(outputs, exact, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


@every_block
def test_a_memory_cannot_be_gathered(name):
    memories = [build(name)(segments()[0])[1] for _ in range(2)]
    with pytest.raises(TypeError, match="cannot be gathered by nn"):
        nn.parallel.scatter_gather.gather(memories, torch.device("cpu"))


@every_block
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(3, 4, WIDTH), r"`past` is of 2 streams and `x` of 3: a memory belongs to its"),
        (torch.zeros(2, 0, WIDTH), r"`x` is \(2, 0, 16\): give a segment \(B, T, 16\) of one tok"),
        (torch.zeros(2, WIDTH), r"`x` is \(2, 16\): give a segment"),
        (torch.zeros(2, 4, 8), r"`x` is \(2, 4, 8\): give a segment"),
    ],
)
def test_segments_that_do_not_fit_are_refused(name, x, message):
    block = build(name)
    memory = block(segments()[0])[1]
    with pytest.raises(ValueError, match=message):
        block(x.double(), memory)


def test_an_odd_width_has_no_sinusoids():
    with pytest.raises(ValueError, match="`embed_dim` is 15: sinusoids take an even width"):
        SinusoidalRelativePositions(15)


def test_a_compiled_memory_layer_computes_the_same():
    layer, x = memory_layer(), segments()[0].float()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for call in (compiled, layer):
        y = call(x)
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
        layer.zero_grad()
    torch.testing.assert_close(*found)


def test_an_exported_memory_layer_computes_the_same():
    layer, x = memory_layer().eval(), segments()[0].float()
    with torch.no_grad():
        exported = torch.export.export(layer, (x,)).module()
        torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_memory_layer_has_the_same_gradients(use_reentrant):
    layer, x = memory_layer(), segments()[0].float().requires_grad_(True)
    found = []
    for call in (layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)):
        call(x).square().sum().backward()
        found.append([p.grad.clone() for p in layer.parameters()])
        layer.zero_grad()
    torch.testing.assert_close(*found)


def test_norms_of_sparse_gradients_are_refused_by_torch():
    for layer in (
        nn.Embedding(16, WIDTH, sparse=True),
        ProductKeyMemory(WIDTH, slots=16, heads=2, knn=3, query_dim=4, sparse=True),
    ):
        x = torch.tensor([1]) if isinstance(layer, nn.Embedding) else segments()[0].float()
        layer(x).sum().backward()
        with pytest.raises((RuntimeError, NotImplementedError)):
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
