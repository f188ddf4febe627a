"""Layers under PyTorch's own tools: what docs/layers.md says of them."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.modules import AllAttentionBlock, TransformerXLBlock

WIDTH, MEMORY = 16, 6
BLOCKS = {
    "transformer-xl": lambda: TransformerXLBlock(WIDTH, 2, 24, MEMORY),
    "all-attention": lambda: AllAttentionBlock(WIDTH, 2, 5, MEMORY),
}
every_block = pytest.mark.parametrize("name", BLOCKS)


def build(name):
    torch.manual_seed(1)
    block = BLOCKS[name]().double()
    for parameter in block.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return block


def segments():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(3, 2, 4, WIDTH, generator=generator, dtype=torch.float64)


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


@pytest.mark.slow
@every_block
def test_compiled_blocks_compute_the_same(name):
    torch.compiler.reset()
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
    found = read(lambda x, memory: block(x.to(dtype), memory), block, grad=False)
    assert {y.dtype for y in found} == {dtype}
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close([y.double() for y in found], exact, rtol=tolerance, atol=tolerance)


@every_block
def test_a_memory_cannot_be_gathered(name):
    memories = [build(name)(segments()[0])[1] for _ in range(2)]
    with pytest.raises(TypeError, match="cannot be gathered by nn"):
        nn.parallel.scatter_gather.gather(memories, torch.device("cpu"))
