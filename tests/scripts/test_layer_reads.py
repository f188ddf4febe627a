"""What is shown of a layer gives what the layer computed."""

import functools

import pytest
import torch

from scripts._shared.layer_reads import EQUATIONS, record
from tests import tiny
from tests.every_model import CASES, make_batch

CLAMPED = functools.partial(tiny.tiny_transformer_xl, clamp_len=5, mem_len=12)
MODELS = {"clamped": CLAMPED, **{name: build for name, (build, _) in CASES.items()}}


@pytest.mark.parametrize("name", MODELS)
def test_reads_give_the_output_of_each_layer(name, monkeypatch):
    # heads with different spans are computed apart
    monkeypatch.setattr("fairseq_plugins.all_attention.adaptive_span.GROUP_COST", 0)
    model, outputs, reads = MODELS[name]().eval(), [], []
    if name.startswith("spans"):
        tiny.spread_spans(model)

    def keep(module, inputs, output):
        outputs.append(output[0] if isinstance(output, tuple) else output)

    for module in model.modules():
        if isinstance(module, tuple(EQUATIONS)):
            module.register_forward_hook(keep)
    with torch.no_grad(), record(model, lambda _, seen: reads.append(seen), *EQUATIONS):
        if hasattr(model.decoder, "network"):
            # the last segment is shorter
            tiny.scores_by_segment(model, tiny.tokens(2, 27), 8)
        else:
            model(**make_batch(model, "cpu")["net_input"])
    assert outputs
    for layer_reads, output in zip(reads, outputs, strict=True):
        torch.testing.assert_close(layer_reads.output, output, rtol=0, atol=1e-5)
