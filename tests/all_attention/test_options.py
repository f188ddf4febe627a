"""Errors of all-attention: each names the option or argument, its value and a remedy."""

import functools
import math
import re
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from torch import nn

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClip
from fairseq_plugins.modules import (
    AdaptiveSpan,
    AllAttention,
    AllAttentionBlock,
    PersistentVectors,
    Window,
)
from tests.tiny import tiny_model

SPLIT, HALVED, APART = (
    {"persistent_variant": variant} for variant in ("attn-split", "head-split", "ff-attn")
)
# the cause of each message, and a part of it
REFUSED = [
    ({"persistent_vectors": -1}, "--persistent-vectors is -1: it must be at least 0"),
    ({"attention_span": 0}, "--attention-span is 0: it must be at least 1"),
    ({"span_ramp": 0}, "--span-ramp is 0: it must be at least 1"),
    ({"span_init": 0.5}, "--span-init is 0.5: it needs --adaptive-span"),
    ({"span_init": 1.5}, "--span-init is 1.5: it must be in [0, 1]"),
    ({"span_init": math.nan}, "--span-init is nan: it must be in [0, 1]"),
    ({"span_epsilon": 1e-8}, "--span-epsilon is 1e-08: it needs --adaptive-span"),
    ({"span_epsilon": -0.1}, "--span-epsilon is -0.1: it must be in [0, 1)"),
    ({"span_epsilon": 1.0}, "--span-epsilon is 1.0: it must be in [0, 1)"),
    ({"span_epsilon": math.nan}, "--span-epsilon is nan: it must be in [0, 1)"),
    ({"adaptive_span": True, "compile_layers": True}, "--compile-layers with --adaptive-span"),
    ({"mem_len": 7}, "--mem-len is 7: attention reaches no farther back than --attention-span, 6"),
    ({**SPLIT, "persistent_vectors": 0}, "is attn-split with --persistent-vectors 0: there are no"),
    ({**HALVED, "decoder_attention_heads": 1}, "`num_heads` is 1: half of them see"),
    ({**APART, "decoder_ffn_embed_dim": 8}, "--decoder-ffn-embed-dim is 8 with --persistent-vari"),
]


def attention(num_heads=4, **options):
    return AllAttention(8, num_heads, Window(1, 4), **options)


adagrad = functools.partial(AdagradWithClip, [nn.Parameter(torch.ones(2))])


def block(*shape):
    """Call a block with a segment of this shape, and a past of two streams of width 16."""
    made = AllAttentionBlock(16, 2, 5, 4)
    return made(torch.zeros(shape), made(torch.zeros(2, 4, 16))[1])


def update_of_a_sparse_table():
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    AdagradWithClip(table.parameters(), lr=0.07).step()


REFUSED += [
    (lambda: attention(variant="new"), "`variant` is 'new': there are all, attn-split, head-split"),
    (lambda: attention(1, variant="head-split"), "`num_heads` is 1: half of them see the context"),
    (lambda: AdaptiveSpan(3, 0), "`span` is 0: it must be at least 1 token"),
    (lambda: AdaptiveSpan(3, 4, ramp=0), "`ramp` is 0: it must be at least 1 token"),
    (lambda: attention(kernel="new", num_persistent=2), "`kernel` is 'new': there are fast, plain"),
    (lambda: PersistentVectors(2, 1, 4, "new"), "`kernel` is 'new': there are fast, plain"),
    (lambda: block(3, 4, 16), "`past` has 2 streams and `x` has 3"),
    (lambda: adagrad(lr=-0.1), "`lr` is -0.1: it must be 0 or more, and finite"),
    (lambda: adagrad(lr=math.nan), "`lr` is nan: it must be 0 or more, and finite"),
    (lambda: adagrad(lr=1, clip=math.inf), "`clip` is inf: it must be 0 or more, and finite"),
    (lambda: adagrad(lr=1, weight_decay=-1.0), "`weight_decay` is -1.0: it must be 0 or more"),
    (update_of_a_sparse_table, "a parameter of shape (4, 3) has a sparse gradient"),
    (
        lambda: tiny_model().load_state_dict(tiny_model(adaptive_span=True).state_dict()),
        "learned attention spans, and this model has none: leave --adaptive-span",
    ),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(refused, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_model(**refused) if isinstance(refused, dict) else refused()


@pytest.mark.parametrize(
    ("name", "count"), [("text8_large", 113_283_360), ("text8_large_ff_attn", 100_712_640)]
)
def test_layers_of_figure_2_have_about_as_many_parameters(name, count):
    """Section 5.3: "to maintain the number of parameters same"."""
    options = Namespace(tokens_per_sample=9, extended_context=0)
    ARCH_CONFIG_REGISTRY[f"all_attention_lm_{name}"](options)
    with torch.device("meta"):
        layers = tiny_model(**vars(options)).decoder.network.layers
    assert sum(parameter.numel() for parameter in layers.parameters()) == count
    assert layers[0].self_attn.dropout == 0.4
