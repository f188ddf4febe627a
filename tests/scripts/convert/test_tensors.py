"""Tensors that do not fit the options are import_error by their names in the file."""

import sys

import pytest
import torch

from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    adaptive_span,
    transformer_xl,
    transformer_xl_tensorflow,
)

FEED_FORWARD = "transformer/layer_1/ff/layer_1/kernel"
PROJECTION = "transformer/adaptive_softmax/cutoff_2/proj"


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("r_w_bias", lambda tensor: None, "lacks r_w_bias (2 x 8)"),
        ("r_r_bias", torch.t, "r_r_bias is 8 x 2"),
        ("layers.0.dec_attn.o_net.weight", lambda tensor: tensor.log(), "not finite"),
        ("layers.0.dec_attn.r_net.weight", torch.Tensor.long, "layers.0.dec_attn.r_net.weight is"),
        ("layers.1.dec_attn.r_net.weight", torch.Tensor.to_sparse, "layers.1.dec_attn.r_net.w"),
        ("crit.out_layers.1.weight", lambda tensor: tensor + 1, "crit.out_layers.1.weight differs"),
        ("crit.out_projs.2", lambda tensor: tensor * 2, "crit.out_projs.2 differs"),
        ("another", lambda tensor: torch.zeros(()), "another"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(import_error, name, change, named):
    foreign = transformer_xl(CUTOFFS, 2)
    changed = change(foreign.tensors.get(name))
    tensors = {key: value for key, value in foreign.tensors.items() if key != name}
    message = import_error(
        foreign._replace(tensors=tensors | ({} if changed is None else {name: changed}))
    )
    assert named in message


@pytest.mark.parametrize(
    ("name", "tensor", "named"),
    [
        (FEED_FORWARD, torch.zeros(24, 16), f"{FEED_FORWARD} is 24 x 16"),
        (PROJECTION, torch.zeros(4, 16), f"{PROJECTION} differs from transformer/adaptive_embed"),
        ("transformer/layer_2/rel_attn/o/kernel", torch.zeros(16, 16), "layer_2/rel_attn/o/kernel"),
    ],
)
def test_tensors_of_tensorflow_are_named_as_there(import_error, name, tensor, named):
    foreign = transformer_xl_tensorflow(CUTOFFS, 2, untie_r=True)
    assert named in import_error(foreign._replace(tensors={**foreign.tensors, name: tensor}))


def test_other_heads_than_the_spans_have_are_refused(import_error):
    foreign = adaptive_span(cutoffs=CUTOFFS)
    message = import_error(foreign._replace(config={**foreign.config, "nb_heads": 4}))
    assert "but the configuration says" in message


def test_safetensors_that_cannot_be_read_are_refused(tmp_path, monkeypatch, import_error):
    foreign = transformer_xl()
    path = foreign.write(tmp_path, "model.safetensors") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    message = import_error(foreign, write=False, name=path.name)
    assert f"--checkpoint {path} is cut short or damaged" in message
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = import_error(foreign, write=False, name=path.name)
    assert "pip install safetensors" in message
