"""Blocks equal the models' layers; the code of docs/layers.md and of the example runs."""

import copy
import io
import re
import runpy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_plugins.modules import AllAttentionBlock, TransformerXLBlock
from tests.end_to_end.commands import ROOT
from tests.tiny import scores_by_segment, spread_spans, tiny_model, tiny_transformer_xl, tokens

LENGTH, MEMORY, SPAN, SEGMENTS, WIDTH = 8, 11, 6, 4, 16


def test_the_code_of_the_page_runs_in_order():
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    names = {"__name__": "page"}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    assert names["y"].shape == (8, 16, 64)
    assert names["memory"].length == names["block"].span == 32
    assert names["output"].shape == (16, 4, 512)


@pytest.fixture(scope="module")
def example():
    """Return the names that the example defines."""
    return runpy.run_path(str(ROOT / "examples" / "plain_pytorch" / "train.py"))


def transformer_xl():
    model = tiny_transformer_xl(mem_len=MEMORY)
    for vector in model.decoder.layers[0].self_attn.biases.parameters():
        nn.init.normal_(vector)
    return model, TransformerXLBlock(16, 2, 24, MEMORY)


def all_attention():
    model = tiny_model(adaptive_span=True, span_ramp=2, mem_len=SPAN)
    spread_spans(model)
    block = AllAttentionBlock(16, 2, 5, SPAN)
    block.self_attn.span.ramp = 2
    block.positions.load_state_dict(model.decoder.positions.state_dict())
    return model, block


@pytest.mark.parametrize("build", [transformer_xl, all_attention])
@pytest.mark.parametrize("training", [True, False])
def test_a_block_is_the_models_layer(build, training):
    """Compare it with each layer of a model that reads a text segment by segment."""
    model, block = (module.train(training) for module in build())
    stream, seen = tokens(2, SEGMENTS * LENGTH), []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda layer, args, out: seen.append((layer, args[0], out[0])))
    memories = {}
    with torch.set_grad_enabled(training):
        scores_by_segment(model, stream, LENGTH, torch.enable_grad if training else torch.no_grad)
        for layer, x, expected in seen:
            block.load_state_dict(layer.state_dict(), strict=False)
            y, memories[layer] = block(x, memories.get(layer))
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert len(seen) == SEGMENTS * len(model.decoder.layers)
    # without its memory, it would not equal the layer
    assert not torch.allclose(block(x)[0], expected)


def test_the_example_carries_its_memory_to_the_end_of_the_text(example, monkeypatch):
    read, forward = [], example["LanguageModel"].forward

    def recorded(self, inputs, memories=None):
        read.append(None if memories is None else [memory.length for memory in memories])
        return forward(self, inputs, memories)

    monkeypatch.setattr(example["LanguageModel"], "forward", recorded)
    example["train"]("to be or not to be? " * 4, updates=5, streams=2, segment=13)
    # three segments of each stream, then from the start again
    assert read == [None, [13, 13], [26, 26], None, [13, 13]]


def test_a_text_that_is_too_short_or_missing_is_refused(example, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("short", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["train.py", str(tmp_path / "text")])
    assert example["main"]() == 1
    assert capsys.readouterr().err.startswith("error: the text has 5 characters: ")
    (tmp_path / "text").unlink()
    assert example["main"]() == 1
    assert str(tmp_path / "text") in capsys.readouterr().err


# --- under PyTorch's own tools

BLOCKS = {
    "transformer-xl": lambda: TransformerXLBlock(WIDTH, 2, 24, SPAN),
    "all-attention": lambda: AllAttentionBlock(WIDTH, 2, 5, SPAN),
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
    """Return the outputs of consecutive segments, and the gradients of their sum of squares."""
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
