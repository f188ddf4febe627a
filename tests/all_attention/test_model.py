"""Whole all-attention models and their ablations; weights of models with other spans."""

import pytest
import torch

from fairseq_plugins.all_attention import adaptive_span as adaptive_span_file
from tests.reference.all_attention import network
from tests.segment_language_model.reading import assert_generates_as, assert_reads_as
from tests.tiny import VARIANTS, scores_by_segment, spread_spans, tiny_model, tokens

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


@pytest.mark.parametrize("now", [10, 40])
def test_weights_fit_another_largest_span(now, caplog):
    """Heads see as far as before, or as far as the new limit allows."""
    trained = tiny_model(attention_span=20, adaptive_span=True, span_ramp=4).double()
    for span in trained.learned_spans():
        span.value.data = torch.tensor([0.1, 0.2], dtype=torch.float64)
    model = tiny_model(seed=2, attention_span=now, adaptive_span=True, span_ramp=4).double()
    model.load_state_dict(trained.state_dict())
    assert f"--attention-span 20, and here it is {now}" in caplog.text
    assert "--reset-optimizer" in caplog.text
    for span in model.learned_spans():
        assert (span.value * now).tolist() == pytest.approx([2, 4])
    stream = tokens(2, 60)
    torch.testing.assert_close(
        scores_by_segment(model, stream, 7), scores_by_segment(trained, stream, 7)
    )


def test_distances_that_had_no_vector_get_the_farthest_ones():
    trained, model = tiny_model(attention_span=6), tiny_model(attention_span=9)
    model.load_state_dict(trained.state_dict())
    before, now = (m.decoder.network.positions.weight for m in (trained, model))
    assert torch.equal(now, torch.cat([before, before[-1:].expand(3, -1)]))


def test_weights_with_a_fixed_span_fit_an_adaptive_one():
    fixed = tiny_model(attention_span=16)
    adaptive = tiny_model(seed=2, attention_span=16, adaptive_span=True)
    adaptive.load_state_dict(fixed.state_dict())
    stream = tokens(2, 40)
    assert torch.equal(scores_by_segment(adaptive, stream, 8), scores_by_segment(fixed, stream, 8))
