"""Whole all-attention models and their ablations."""

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span as adaptive_span_file
from tests.reference.all_attention import network
from tests.segment_language_model.reading import assert_generates_as, assert_reads_as
from tests.tiny import VARIANTS, spread_spans, tiny_model, tokens

SPAN, RAMP = 12, 3
FEED_FORWARD = {"decoder_ffn_embed_dim": 24, "persistent_vectors": 0}
LEARNED = {"adaptive_span": True, "span_ramp": RAMP}
OPEN = {"adaptive_span": True, "span_init": 1.0}
EVERY_VARIANT = [*VARIANTS, "ff-attn"]
MODELS = [
    *({"persistent_variant": variant, **LEARNED} for variant in EVERY_VARIANT),
    *({"persistent_variant": variant, **LEARNED, "span_epsilon": 0.2} for variant in EVERY_VARIANT),
    *({**options, **spans} for options in ({}, FEED_FORWARD) for spans in ({}, LEARNED, OPEN)),
    {"share_decoder_input_output_embed": True, "output_bias": True},
    {"clamp_len": 3},
    *({**LEARNED, "mem_len": length, "same_length": True} for length in (3, 7, 12)),
    {"mem_len": 4, "same_length": True},
]


@pytest.mark.parametrize("options", MODELS, ids=str)
def test_scores_equal_the_reference_in_any_segments(monkeypatch, options):
    monkeypatch.setattr(adaptive_span_file, "GROUP_COST", 0)
    model = tiny_model(attention_span=SPAN, **options).double()
    if "span_init" not in options:
        spread_spans(model)
    stream = tokens(2, 19)
    span = options["mem_len"] if "same_length" in options else SPAN
    expected = torch.stack([network(model.decoder, row, span) for row in stream])
    assert_reads_as(model, stream, expected)
    assert_generates_as(model, stream, expected)
