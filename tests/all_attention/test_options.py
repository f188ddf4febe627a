"""All-attention's options: each refusal names the option, its value and a remedy."""

import pytest

from tests.tiny import tiny_model

REFUSED = [
    ({"persistent_vectors": -1}, "--persistent-vectors is -1: it must be at least 0"),
    ({"attention_span": 0}, "--attention-span is 0: it must be at least 1"),
    ({"span_ramp": 0}, "--span-ramp is 0: it must be at least 1"),
    ({"span_init": 0.5}, "--span-init is 0.5: it needs --adaptive-span"),
    ({"span_init": 1.5}, "--span-init is 1.5: it must be in [0, 1]"),
    ({"span_epsilon": 1e-8}, "--span-epsilon is 1e-08: it needs --adaptive-span"),
    ({"span_epsilon": -0.1}, "--span-epsilon is -0.1: it must be in [0, 1)"),
    ({"span_epsilon": 1.0}, "--span-epsilon is 1.0: it must be in [0, 1)"),
    ({"span_epsilon": float("nan")}, "--span-epsilon is nan: it must be in [0, 1)"),
    ({"mem_len": 7}, "--mem-len is 7: attention reaches no farther back than --attention-span, 6"),
    (
        {"persistent_variant": "attn-split", "persistent_vectors": 0},
        "--persistent-variant is attn-split with --persistent-vectors 0: there are none to place",
    ),
    (
        {"persistent_variant": "head-split", "decoder_attention_heads": 1},
        "--decoder-attention-heads is 1: half of them see",
    ),
    (
        {"persistent_variant": "ff-attn", "decoder_ffn_embed_dim": 8},
        "--decoder-ffn-embed-dim is 8 with --persistent-variant ff-attn",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_make_no_model_are_refused_by_name(options, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the message is checked below)
        tiny_model(**options)
    assert message in str(refused.value)
