"""Trainings equal those of the published codes, update by update, from the same weights.

They need checkouts of the published code, which ORIGINALS names, separated by colons.
"""

import copy
import importlib
import os
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from benchmarks import published
from benchmarks.language_models import SYMBOLS, Ours, StreamTask, make_dictionary
from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClip
from fairseq_plugins.all_attention.model import AllAttentionConfig, AllAttentionLanguageModel
from fairseq_plugins.modules import ProductKeyMemory
from fairseq_plugins.transformer_xl.model import TransformerXLConfig, TransformerXLLanguageModel

CHECKOUTS = [Path(path) for path in os.environ.get("ORIGINALS", "").split(os.pathsep) if path]
CLASSES = published.import_published(CHECKOUTS)
UPDATES, STREAMS, TOKENS, WIDTH = 60, 4, 16, 32
SIZES = {
    "decoder_layers": 3,
    "decoder_embed_dim": WIDTH,
    "decoder_attention_heads": 2,
    "tokens_per_sample": TOKENS,
    "extended_context": 0,
    "output_bias": True,
    "dropout": 0.0,
}


def original(paper):
    """Return a published class; skip the test without its checkout."""
    if paper not in CLASSES:
        pytest.skip(f"ORIGINALS names no checkout of {published.CHECKOUTS[paper].url}")
    return CLASSES[paper]


def with_weights_of(theirs, ours):
    """Return our model with the published model's weights."""
    weights = published.translate(theirs.model, theirs.options, make_dictionary())
    ours.load_state_dict({**ours.state_dict(), **weights})
    return Ours(ours)


def adam(model):
    return torch.optim.Adam(model.parameters(), 1e-3)


def train(model, make_optimizer, clip, spans=()):
    """Return the losses of updates on one text in float64; the past goes on in each."""
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(4, SYMBOLS, (STREAMS, UPDATES * TOKENS + 1), generator=generator)
    optimizer, losses = make_optimizer(model.double()), []
    for first in range(0, UPDATES * TOKENS, TOKENS):
        loss = model.losses(text[:, first : first + TOKENS + 1]).mean()
        optimizer.zero_grad()
        loss.backward()
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        for span in spans:
            span.data.clamp_(0, 1)
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def assert_trains_alike(ours, theirs):
    """Check that losses agree, and that the training learned."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert ours[-5:].mean() < ours[:5].mean()


@pytest.mark.parametrize(
    "options",
    [{"mem_len": 16}, {"mem_len": 40}, {"mem_len": 40, "same_length": True, "clamp_len": 20}],
    ids=str,
)
def test_transformer_xl_trains_as_the_published_code(options):
    published_class = original("transformer_xl")
    shared = {"decoder_ffn_embed_dim": 64, "share_decoder_input_output_embed": True}
    cfg = TransformerXLConfig(**SIZES, **shared, attention_dropout=0.0, **options)
    torch.manual_seed(1)
    theirs = published.PublishedTransformerXL(published_class, cfg, SYMBOLS + 2)
    model = TransformerXLLanguageModel.build_model(cfg, StreamTask(make_dictionary()))
    ours, theirs.memory = with_weights_of(theirs, model), []
    ours.past = None
    assert_trains_alike(train(ours, adam, 0.25), train(theirs, adam, 0.25))


def published_adagrad():
    """Return the published optimizer, which clips each parameter's gradient."""
    for path in CHECKOUTS:
        if (path / "adagrad_with_grad_clip.py").is_file():
            with mock.patch.object(sys, "path", [str(path), *sys.path]):
                return importlib.import_module("adagrad_with_grad_clip").AdagradWithGradClip
    raise AssertionError("the checkout has no adagrad_with_grad_clip.py")


@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize(
    "options",
    [{"persistent_vectors": 8}, {"persistent_vectors": 0, "decoder_ffn_embed_dim": 64}],
    ids=["all-attention", "adaptive span"],
)
def test_all_attention_trains_as_the_published_code(options, optimizer):
    published_class = original("all_attention")
    sizes = {"attention_span": 32, "adaptive_span": True, "span_ramp": 8, "span_epsilon": 1e-8}
    cfg = AllAttentionConfig(**SIZES, **{"decoder_ffn_embed_dim": 0, **sizes, **options})
    torch.manual_seed(1)
    theirs = published.PublishedAllAttention(published_class, cfg, SYMBOLS + 2, spans=0.3)
    model = AllAttentionLanguageModel.build_model(cfg, StreamTask(make_dictionary()))
    ours = with_weights_of(theirs, model)
    # the published past begins as zeros
    for reader in (ours, theirs):
        reader.remember(torch.zeros(STREAMS, cfg.attention_span, WIDTH, dtype=torch.float64))
    spans = (
        [span.value for span in model.learned_spans()],
        [p for name, p in theirs.named_parameters() if name.endswith("current_val")],
    )
    makers, clip = (adam, adam), 0.25
    if optimizer == "adagrad":
        makers = (
            lambda model: AdagradWithClip(model.parameters(), 0.02, clip=0.03),
            lambda model: published_adagrad()(model.parameters(), 0.02, grad_clip=0.03),
        )
        clip = 0.0
    readers = zip((ours, theirs), makers, spans, strict=True)
    assert_trains_alike(*(train(reader, make, clip, own) for reader, make, own in readers))


class Regression(nn.Module):
    """A memory between two linear maps."""

    def __init__(self, memory, maps):
        super().__init__()
        self.memory = memory
        self.maps = maps

    def forward(self, x):
        return self.maps[1](self.memory(self.maps[0](x)))


def test_a_memory_trains_as_the_published_code():
    published_class = original("product_key_memory")
    torch.manual_seed(1)
    memory = ProductKeyMemory(WIDTH, slots=16**2, heads=2, knn=4, query_dim=16)
    theirs = published.PublishedMemory(published_class, copy.deepcopy(memory), sparse=False)
    maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    batches = torch.randn(UPDATES, 2, 64, WIDTH, dtype=torch.float64)
    losses = []
    for each in (memory, theirs):
        model = Regression(each, copy.deepcopy(maps)).double()
        optimizer = adam(model)
        losses.append([])
        for x, target in batches:
            loss = (model(x) - target.sin()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    ours, published_losses = map(torch.tensor, losses)
    torch.testing.assert_close(ours, published_losses, rtol=0, atol=1e-6)
    assert ours[-5:].mean() < ours[:5].mean()
