"""Weights that do not fit a model, or are not finite, are refused in a sentence."""

import re
from collections import OrderedDict

import pytest
import torch

from fairseq_plugins.fairseq_integration.checkpoint_files import weights_loaded_into


@pytest.mark.parametrize(
    ("weights", "kind", "reason"),
    [
        ({"weight": torch.ones(2, 3)}, ValueError, 'Missing key(s) in state_dict: "bias"'),
        ({"extra": torch.ones(1)}, ValueError, 'Unexpected key(s) in state_dict: "extra"'),
        ({"weight": torch.ones(3, 2)}, ValueError, "size mismatch for weight"),
        ({"bias": 1.0}, ValueError, 'While copying the parameter named "bias"'),
        ({"bias": torch.tensor([1, torch.nan])}, FloatingPointError, "bias has a number that is"),
        ({"bias": torch.tensor([1, torch.inf])}, FloatingPointError, "bias has a number that is"),
    ],
)
def test_weights_that_do_not_fit_are_told_in_a_sentence(weights, kind, reason):
    model = torch.nn.Linear(3, 2)
    if "Missing" not in reason:
        weights = {**model.state_dict(), **weights}
    weights = OrderedDict(weights)
    weights.read_from = "runs/last.pt"
    told = remedy = ""
    if kind is ValueError:
        told = "the weights of the checkpoint runs/last.pt do not fit the model"
        remedy = (
            "give the options that it was trained with, or name another checkpoint; a new training "
            "needs a --save-dir of its own$"
        )
    match = f"^{told}.*{re.escape(reason)}.*: {remedy}"
    loading = weights_loaded_into(model, weights)
    with pytest.raises(kind, match=match) as raised, loading:
        model.load_state_dict(weights)
    assert "runs/last.pt" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_statistics_that_are_not_finite_are_refused(number):
    model = torch.nn.BatchNorm1d(2)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights["running_mean"][1] = number
    loading = weights_loaded_into(model, weights)
    with pytest.raises(FloatingPointError, match=r"^running_mean has a number that is"), loading:
        model.load_state_dict(weights)


def test_buffers_that_hold_no_weights_may_be_anything():
    """Those that no checkpoint has, and those that fairseq leaves as the memory was."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.tensor(-torch.inf), persistent=False)
    model.register_buffer("_float_tensor", torch.tensor(torch.nan))
    with weights_loaded_into(model, model.state_dict()):
        model.load_state_dict(model.state_dict())
