"""Dropout of the same elements at every token, of whole words, and of each part of a model."""

import pytest
import torch

from fairseq_plugins.transformer_xl.dropout import LockedDropout, WordDropout
from tests.tiny import tiny_transformer_xl, tokens


def test_locked_dropout_drops_the_same_elements_at_every_token():
    out = LockedDropout(0.25)(torch.ones(3, 7, 400))
    dropped = out == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(out[~dropped], torch.full_like(out[~dropped], 4 / 3))
    assert abs(dropped.float().mean() - 0.25) < 0.05


def test_word_dropout_drops_a_word_wherever_it_occurs():
    tokens = torch.randint(0, 500, (4, 2000))
    out = WordDropout(0.25, 500)(torch.ones(4, 2000, 3), tokens)
    dropped = {int(t) for t in tokens[(out == 0).all(dim=-1)]}
    others = {int(t) for t in tokens[(out != 0).any(dim=-1)]}
    assert dropped.isdisjoint(others)
    assert abs(len(dropped) / 500 - 0.25) < 0.06
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 4 / 3))


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_word_dropout_refuses_impossible_rates(p):
    with pytest.raises(ValueError, match=rf"`p` is {p}: .*\[0, 1\)"):
        WordDropout(p, 5)


def test_every_dropout_acts_in_training_only():
    stream = tokens(2, 8)
    plain = tiny_transformer_xl()(stream)[0]
    for part in ("", "embed_", "output_", "attention_", "activation_", "word_"):
        for locked in (False, True):
            model = tiny_transformer_xl(**{f"{part}dropout": 0.5}, locked_dropout=locked)
            assert not torch.allclose(model(stream)[0], plain), part
            torch.testing.assert_close(model.eval()(stream)[0], plain)


def test_position_encodings_are_dropped_with_the_embeddings():
    for locked in (False, True):
        model = tiny_transformer_xl(embed_dropout=0.5, locked_dropout=locked)
        dropped = model.decoder.network.positions(30, torch.empty(0)) == 0
        # locked dropout drops the same elements of all distances
        assert 0.2 < dropped.float().mean() < 0.8
        assert torch.equal(dropped[1:-2], dropped[:-3]) == locked
    # drawn anew also for distances that share the clamp's encoding
    positions = tiny_transformer_xl(embed_dropout=0.5, clamp_len=4).decoder.network.positions
    beyond = positions(30, torch.empty(0))[:20]
    assert not torch.equal(beyond, beyond[:1].expand_as(beyond))
    # absolute encodings are added before the embeddings' dropout
    absolute, seen = tiny_transformer_xl(embed_dropout=0.5, positions="sinusoidal-absolute"), []
    absolute.decoder.network.layers[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    absolute(tokens(2, 8))
    assert (seen[0] == 0).any()
