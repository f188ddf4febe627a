"""Locked and word dropout drop what they say, everywhere, and keep the mean."""

import torch

from fairseq_plugins.transformer_xl.layers import LockedDropout, WordDropout


def test_locked_dropout_drops_the_same_elements_at_every_token_of_a_stream():
    torch.manual_seed(1)
    out = LockedDropout(0.25)(torch.ones(3, 7, 400))
    dropped = out == 0
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(out[~dropped], torch.full_like(out[~dropped], 4 / 3))
    assert abs(dropped.float().mean() - 0.25) < 0.05


def test_word_dropout_drops_a_word_wherever_it_occurs():
    torch.manual_seed(1)
    tokens = torch.randint(0, 500, (4, 2000))
    out = WordDropout(0.25, 500)(torch.ones(4, 2000, 3), tokens)
    dropped = {int(t) for t in tokens[(out == 0).all(dim=-1)]}
    kept = {int(t) for t in tokens[(out != 0).any(dim=-1)]}
    assert dropped.isdisjoint(kept)
    assert abs(len(dropped) / 500 - 0.25) < 0.06
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 4 / 3))


def test_nothing_is_dropped_in_evaluation_or_at_rate_0():
    x, tokens = torch.randn(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)
    assert LockedDropout(0.5).eval()(x) is x
    assert LockedDropout(0.0)(x) is x
    assert WordDropout(0.5, 9).eval()(x, tokens) is x
    assert WordDropout(0.0, 9)(x, tokens) is x
