"""The presets of Transformer-XL: what their tables of flags do not say."""

import pytest

from fairseq_plugins.transformer_xl.layers import LockedDropout
from scripts.docs.tables import build, parse
from tests.recipes import HYDRA

pytestmark = pytest.mark.filterwarnings(HYDRA)


def preset(name, symbols):
    """The decoder of a preset on the meta device."""
    task = ("--task", "segment_language_modeling")
    return build(parse(["DATA", *task, "--arch", f"transformer_xl_{name}"]), symbols).decoder


@pytest.mark.parametrize(
    ("name", "dropout", "attention"), [("enwik8_base", 0.1, 0.0), ("enwik8_large", 0.15, 0.15)]
)
def test_one_dropout_is_everywhere_but_in_the_attention(name, dropout, attention):
    decoder = preset(name, 205)
    for layer in decoder.layers:
        assert layer.feed_forward.dropout.p == layer.dropout.p == dropout
        assert (layer.self_attn.dropout, layer.normalize_before) == (attention, False)
    dropouts = (decoder.embed_dropout, decoder.output_dropout, decoder.positions.dropout)
    assert [each.p for each in dropouts] == [dropout] * 3
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    assert decoder.output_projection.bias is not None


def test_the_ptb_preset_drops_as_published():
    decoder = preset("ptb", 10_000)
    layer = decoder.layers[0]
    locked = (decoder.embed_dropout, decoder.output_dropout, layer.dropout)
    locked = (*locked, layer.feed_forward.dropout)
    assert all(isinstance(dropout, LockedDropout) for dropout in locked)
    assert [dropout.p for dropout in locked] == [0.6, 0.5, 0.2, 0.2]
    assert (decoder.word_dropout.p, layer.self_attn.dropout) == (0.2, 0.2)
