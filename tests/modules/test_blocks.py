"""Blocks are the models' own layers; the example carries its memory."""

import re
import runpy

import pytest
import torch
from torch import nn

from fairseq_plugins.modules import AllAttentionBlock, TransformerXLBlock
from tests.end_to_end.commands import ROOT
from tests.tiny import scores_by_segment, spread_spans, tiny_model, tiny_transformer_xl, tokens

LENGTH, MEMORY, SPAN, SEGMENTS = 8, 11, 6, 4


def test_the_code_of_the_page_runs_in_order():
    page = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")
    names = {"__name__": "page"}
    exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), names)
    assert names["y"].shape == (8, 16, 64)
    assert names["memory"].length == names["block"].span == 32
    assert names["output"].shape == (16, 4, 512)


@pytest.fixture(scope="module")
def in_example():
    """The names that the example defines."""
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
    """Each layer of a model as it reads a text segment by segment."""
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
    # without its memory it would not be
    assert not torch.allclose(block(x)[0], expected)


def test_the_example_carries_its_memory_to_the_end_of_the_text(in_example, monkeypatch):
    read, forward = [], in_example["LanguageModel"].forward

    def recorded(self, inputs, memories=None):
        read.append(None if memories is None else [memory.length for memory in memories])
        return forward(self, inputs, memories)

    monkeypatch.setattr(in_example["LanguageModel"], "forward", recorded)
    in_example["train"]("to be or not to be? " * 4, updates=5, streams=2, segment=13)
    # three segments of each stream, then from the start
    assert read == [None, [13, 13], [26, 26], None, [13, 13]]


def test_a_text_that_is_too_short_is_refused(in_example, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("short", encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["train.py", str(tmp_path / "text")])
    assert in_example["main"]() == 1
    assert capsys.readouterr().err.startswith("error: the text has 5 characters: ")
