"""Blocks are the models' own layers; the example carries its memory."""

import re
import runpy

import pytest
import torch
from torch import nn

from fairseq_plugins.modules import AllAttentionBlock, TransformerXLBlock
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests.end_to_end.commands import ROOT
from tests.tiny import spread_spans, tiny_model, tiny_transformer_xl, tokens

LENGTH, MEMORY, SPAN, SEGMENTS = 8, 11, 6, 4


@pytest.fixture(scope="module")
def page():
    """The code of docs/layers.md, in order."""
    text = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="module")
def on_page(page):
    """The names that the page's code defines."""
    names = {"__name__": "page"}
    exec("\n".join(page), names)
    return names


@pytest.fixture(scope="module")
def in_example():
    """The names that the example defines."""
    return runpy.run_path(str(ROOT / "examples" / "plain_pytorch" / "train.py"))


def test_the_code_of_the_page_runs_in_order(on_page):
    assert on_page["y"].shape == (8, 16, 64)
    assert on_page["memory"].length == on_page["block"].span == 32
    assert on_page["output"].shape == (16, 4, 512)


def assert_is_the_models_layer(model, block, grad):
    """Compare with each layer of a model as it reads a text segment by segment."""
    stream = tokens(2, SEGMENTS * LENGTH)
    seen = []
    hooks = [
        layer.register_forward_hook(lambda layer, args, out: seen.append((layer, args[0], out[0])))
        for layer in model.decoder.layers
    ]
    recurrence, memories = Recurrence(), {}
    with torch.set_grad_enabled(grad):
        for start in range(0, stream.size(1), LENGTH):
            model(stream[:, start : start + LENGTH], recurrence=recurrence, start=start)
        for layer, x, expected in seen:
            block.load_state_dict(layer.state_dict(), strict=False)
            y, memories[layer] = block(x, memories.get(layer))
            torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert len(seen) == SEGMENTS * len(model.decoder.layers)
    assert len(memories) == len(hooks)
    # without its memory it would not be
    assert not torch.allclose(block(x)[0], expected)


@pytest.mark.parametrize("training", [True, False])
def test_a_transformer_xl_block_is_the_models_layer(training):
    block = TransformerXLBlock(16, 2, 24, MEMORY).train(training)
    model = tiny_transformer_xl(mem_len=MEMORY).train(training)
    for vector in model.decoder.layers[0].self_attn.biases.parameters():
        nn.init.normal_(vector)
    assert_is_the_models_layer(model, block, training)


@pytest.mark.parametrize("training", [True, False])
def test_an_all_attention_block_is_the_models_layer(training):
    options = {"adaptive_span": True, "span_ramp": 2, "mem_len": SPAN}
    model = tiny_model(**options).train(training)
    spread_spans(model)
    block = AllAttentionBlock(16, 2, 5, SPAN).train(training)
    block.self_attn.span.ramp = 2
    block.positions.load_state_dict(model.decoder.positions.state_dict())
    assert_is_the_models_layer(model, block, training)


def test_the_example_reads_a_text_in_pieces_as_it_does_whole(in_example):
    model = in_example["LanguageModel"](20, width=16, heads=2, mem_len=40).eval()
    stream = tokens(2, 30)
    whole, _ = model(stream)
    pieces, memories = [], None
    for part in stream.split(7, dim=1):
        scores, memories = model(part, memories)
        pieces.append(scores)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


def test_the_example_carries_its_memory_to_the_end_of_the_text(in_example, monkeypatch):
    read, model = [], in_example["LanguageModel"]
    forward = model.forward

    def recorded(self, inputs, memories=None):
        read.append(None if memories is None else [memory.length for memory in memories])
        return forward(self, inputs, memories)

    monkeypatch.setattr(model, "forward", recorded)
    in_example["train"]("to be or not to be? " * 4, updates=5, streams=2, segment=13)
    # three segments of each stream, then from the start
    assert read == [None, [13, 13], [26, 26], None, [13, 13]]


def test_a_text_that_is_too_short_is_refused(in_example, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text"
    text.write_text("short", encoding="utf-8")
    for path, message in [
        (text, "the text has 5 characters: 8 streams of segments of 64 take 513 or more"),
        (tmp_path / "none", f"[Errno 2] No such file or directory: '{tmp_path / 'none'}'"),
    ]:
        monkeypatch.setattr("sys.argv", ["train.py", str(path)])
        assert in_example["main"]() == 1
        assert capsys.readouterr() == ("", f"error: {message}\n")
