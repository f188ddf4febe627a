"""Errors of all-attention: each names the option or argument, its value and a remedy."""

import math
import re

import pytest
import torch
from torch import nn

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClip
from fairseq_plugins.modules import AdaptiveSpan, AllAttention, Window
from tests.tiny import tiny_model

SPLIT, HALVED, APART = (
    {"persistent_variant": variant} for variant in ("attn-split", "head-split", "ff-attn")
)
WEIGHTS = [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"persistent_vectors": -1}, "--persistent-vectors is -1: it must be at least 0"),
        ({"span_init": 0.5}, "--span-init is 0.5: it needs --adaptive-span"),
        ({"span_init": math.nan}, "--span-init is nan: it must be in [0, 1]"),
        (
            {"adaptive_span": True, "compile_layers": True, "span_epsilon": 1e-8},
            "--span-epsilon is 1e-08 with --compile-layers",
        ),
        ({"mem_len": 7}, "--mem-len is 7: attention reaches no farther back than --attention-span"),
        ({**SPLIT, "persistent_vectors": 0}, "is attn-split with --persistent-vectors 0: there"),
        ({**HALVED, "decoder_attention_heads": 1}, "--decoder-attention-heads is 1: half of them"),
        ({**APART, "decoder_ffn_embed_dim": 8}, "--decoder-ffn-embed-dim is 8 with --persistent-"),
    ],
)
def test_a_model_refuses_impossible_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_model(**options)


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (AdaptiveSpan, {"num_heads": 3, "max_span": 0}, "`span` is 0: it must be at least 1"),
        (
            AllAttention,
            {"embed_dim": 8, "num_heads": 4, "window": Window(1, 4), "variant": "new"},
            "`variant` is 'new': there are all, attn-split, head-split",
        ),
        (AdagradWithClip, {"params": WEIGHTS, "lr": 1, "clip": math.inf}, "`clip` is inf: it must"),
    ],
)
def test_a_part_refuses_impossible_arguments(build, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(**options)


def test_the_optimizer_refuses_a_sparse_gradient():
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"a parameter of shape \(4, 3\) has a sparse gradient"):
        AdagradWithClip(table.parameters(), lr=0.07).step()
