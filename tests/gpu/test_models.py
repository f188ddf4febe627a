"""Tests of the models that need a GPU, and the same tests on a CPU as far as possible.

This way, the bodies of almost all tests also run where there is no GPU.
"""

import functools
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from omegaconf import OmegaConf
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fairseq_plugins.fairseq_integration.parameters import apply_constraints
from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from tests import tiny
from tests.every_model import CASES, SPANS, build_criterion, make_batch
from tests.gpu.host_waits import WAITS, counted_waits
from tests.optimizers import LOSS_SCALES, in_precision
from tests.product_key_memory.tiny import tiny_language_model
from tests.weighted_transformer import tiny as weighted

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
MEMORY_ADAM = "adam_with_memory"
ADAM = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "tpu": False, "fp16_adam_stats": False}
SMOOTHED = "label_smoothed_cross_entropy", "adam_with_branch_weights"
MODELS = {
    "transformer_xl": (tiny.tiny_transformer_xl, "cross_entropy", "adam"),
    "spans": (functools.partial(tiny.tiny_model, **SPANS), "span_loss", "adagrad_with_clip"),
    "memory": (
        functools.partial(tiny_language_model, memory_layers="2", memory_optimizer=MEMORY_ADAM),
        *("cross_entropy", MEMORY_ADAM),
    ),
    "branches, as written": (weighted.tiny_as_written, *SMOOTHED),
    "branches": (weighted.tiny_weighted_transformer, *SMOOTHED),
}
# precision: the model's dtype, and the tolerance of losses in nats against fp32 on a CPU
PRECISIONS = {
    "fp32": (torch.float32, 1e-4),
    "bf16": (torch.bfloat16, 0.1),
    "fp16": (torch.float16, 0.03),
    "amp": (torch.float32, 0.03),
}
UPDATES = 6


@pytest.fixture(autouse=True)
def fairseq_without_a_gpu(request, monkeypatch):
    """Let fairseq's flat copies work on a CPU.

    fairseq stores a flat copy under the index of the GPU, which is None for parameters on a CPU.
    """
    if "cpu" in request.node.name:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def misplaced(model, device):
    """Return names of a model's tensors, registered or not, that are on another device.

    Skip fairseq's mask and sinusoids, which are created when they are used.
    """
    return [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        if not isinstance(module, SinusoidalPositionalEmbedding)
        for attribute, value in vars(module).items()
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.device.type != device and attribute != "_future_mask"
    ]


@pytest.mark.parametrize("device", ["meta", ON_GPU])
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_moves_with_its_model(case, device):
    model = CASES[case][0]()
    assert misplaced(model.to(device), device) == []
    model.spare = {"of": [torch.ones(1)]}
    assert misplaced(model, device) == [".spare"]


def learn(device, precision, kind, during=None):
    """Train; return the losses in nats a token, the model and its optimizer.

    ``during`` is a context of the updates.
    """
    build, criterion, optimizer = MODELS[kind]
    dtype = PRECISIONS[precision][0]
    # the learning rate is so large that κ, α and spans would leave their bounds if unconstrained
    model = build(dropout=0.0).to(device).to(dtype).train()
    criterion = build_criterion(criterion).train()
    options = {"_name": optimizer, "lr": [0.01], **(ADAM if "adam" in optimizer else {})}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = in_precision(
        OmegaConf.create(options), parameters, None if precision == "fp32" else precision
    )
    sample = make_batch(model, device)
    pasts = EnsemblePasts() if hasattr(model.decoder, "network") else None
    losses = []
    with during or nullcontext():
        for update in range(UPDATES):
            if pasts is not None:
                sample["net_input"] |= {"pasts": pasts, "start": 8 * update}
            with torch.autocast(device, torch.float16, enabled=precision == "amp"):
                loss, size, _ = criterion(model, sample)
            optimizer.backward(loss)
            optimizer.multiply_grads(1 / size)
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
            apply_constraints(optimizer, model)
            optimizer.zero_grad()
            losses.append(loss.item() / size)
    return losses, model, optimizer


@functools.cache
def train_reference(kind):
    """Train on a CPU in single precision; return the losses and the model, for comparison."""
    with pytest.MonkeyPatch.context() as patch:
        # fairseq would put the norm of the gradients on a GPU
        patch.setattr(torch.cuda, "is_available", lambda: False)
        losses, model, _ = learn("cpu", "fp32", kind)
    check_bounds(model)
    return losses


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_precision_trains_as_single_precision_does(kind, precision, device):
    exact = train_reference(kind)
    losses, model, optimizer = learn(device, precision, kind)
    assert exact[-1] < exact[0] - 0.1
    assert losses == pytest.approx(exact, abs=PRECISIONS[precision][1])
    if precision == "amp":
        assert optimizer.scaler.is_enabled()
        assert optimizer.scaler.get_scale() == LOSS_SCALES[precision]
    check_bounds(model)


def check_bounds(model):
    """Check that spans, κ and α are in single precision and within their bounds."""
    for module in model.modules():
        if isinstance(module, BranchWeights):
            weighted.assert_on_simplex(module.learned().detach().cpu())
    for span in getattr(model, "learned_spans", list)():
        assert span.value.dtype == torch.float32
        assert ((span.value >= 0) & (span.value <= 1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MODELS)
def test_the_host_waits_where_the_documentation_says(kind):
    waits = Counter()
    learn("cuda", "fp32", kind, during=counted_waits(waits))
    assert set(waits) <= WAITS
