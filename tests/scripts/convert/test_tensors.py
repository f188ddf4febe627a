"""Tensors that do not fit the options are refused by their names in the file."""

import pytest
import torch

from tests.scripts.convert.foreign_models import CUTOFFS, transformer_xl, transformer_xl_tensorflow

FEED_FORWARD = "transformer/layer_1/ff/layer_1/kernel"
PROJECTION = "transformer/adaptive_softmax/cutoff_2/proj"


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("r_w_bias", lambda tensor: None, "lacks r_w_bias, (2, 8)"),
        ("r_r_bias", torch.t, "r_r_bias has the shape (8, 2)"),
        ("crit.out_layers.1.weight", lambda tensor: tensor + 1, "crit.out_layers.1.weight differs"),
        ("crit.out_projs.2", lambda tensor: tensor * 2, "crit.out_projs.2 differs"),
        ("another", lambda tensor: torch.zeros(()), "another are not used"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(import_error, name, change, named):
    foreign = transformer_xl(CUTOFFS, 2)
    changed = change(foreign.tensors.pop(name, None))
    tensors = foreign.tensors | ({} if changed is None else {name: changed})
    assert named in import_error(foreign._replace(tensors=tensors))


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        (FEED_FORWARD, torch.zeros(24, 16), f"{FEED_FORWARD} has the shape (16, 24)"),
        (PROJECTION, torch.zeros(4, 16), f"{PROJECTION} differs from transformer/adaptive_embed"),
    ],
)
def test_tensors_of_tensorflow_are_named_as_there(import_error, name, tensor, named):
    foreign = transformer_xl_tensorflow(CUTOFFS, 2, untie_r=True)
    assert named in import_error(foreign._replace(tensors={**foreign.tensors, name: tensor}))
