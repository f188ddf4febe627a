"""The weights that a training wrote."""

import torch

from fairseq_plugins.fairseq_integration.registration import register

# lets torch's safe loader read fairseq's options
register()

EXACT = {"rtol": 0, "atol": 0}


def parameters(folder):
    """Weights of the last checkpoint, read by torch's safe loader."""
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


def assert_equal(one, other, **tolerance):
    """All weights of two models agree."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **tolerance, msg=name)
