"""Updates on an accelerator: where the host waits, and whether all tensors are on the device.

Torch's meta device has shapes but no numbers. An operation there fails if it needs a number or a
tensor of another device. So if a pass succeeds, all tensors were on the device, and each number
that the host asked for was noticed. fairseq's adaptive input and softmax are not tested: they ask
for the tokens of each band themselves.
"""

import contextlib
import sys
from collections import Counter

import fairseq.utils
import numpy as np
import pytest
import torch
from fairseq.optim.adam import FairseqAdamConfig
from torch import Tensor

from fairseq_plugins.all_attention.optimizer import (
    AdagradWithClipConfig,
    FairseqAdagradWithClip,
)
from fairseq_plugins.fairseq_integration.parameters import apply_constraints
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemoryConfig, FairseqAdamWithMemory
from fairseq_plugins.segment_language_model.batch_split import split_batch
from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts
from fairseq_plugins.weighted_transformer.optimizer import FairseqAdamWithBranchWeights
from tests import tiny
from tests.every_model import CASES, build_criterion, make_batch
from tests.gpu.host_waits import NORM_READ, ROWS_READ, SPANS_READ, WAITS, calling_function

ADAM = {"lr": [1e-3], "adam_betas": "(0.9, 0.98)", "fp16_adam_stats": False}
# how often our functions make the host wait in an update
OFTEN = {case: {SPANS_READ: 1} for case in ("spans", "spans with epsilon")}
# two streams of 8 tokens, one of which ends with padding
PADDED = {"ntokens": 15, "stream_tokens": [8, 7], "start_indices": [0, 0]}


@contextlib.contextmanager
def numbers_read(monkeypatch):
    """Give the host a number whenever it asks for one; yield counts of our functions that ask."""
    asked = Counter()

    def note():
        if name := calling_function(sys._getframe(2)):
            asked[name] += 1

    def number(x):
        return 0.5 if x.is_floating_point() else 1

    def item(x):
        note()
        return number(x)

    def tolist(x):
        note()
        return np.full(tuple(x.shape), number(x)).tolist()

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "tolist", tolist)
        for name, kind in [("__bool__", bool), ("__int__", int), ("__float__", float)]:
            patch.setattr(Tensor, name, lambda x, kind=kind: (note(), kind(1))[1])
        patch.setattr(Tensor, "item", item)
        # fairseq's function moves the norm to the CPU unless it is on a GPU
        patch.setattr(fairseq.utils, "clip_grad_norm_", clip_grad_norm)
        # torch has no autocast for the meta device
        patch.setattr(torch, "autocast", lambda *kind, **options: contextlib.nullcontext())
        patch.setattr(torch, "is_autocast_enabled", lambda *kind: False)
        yield asked


def clip_grad_norm(parameters, max_norm, aggregate_norm_fn=None):
    """Return a number on the device that all gradients are on."""
    (device,) = {p.grad.device for p in parameters if p.grad is not None}
    return torch.empty((), device=device)


def build_optimizer(model):
    """Return an optimizer for a model."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = {type(module).__name__ for module in model.modules()}
    if "AdaptiveSpan" in names:
        return FairseqAdagradWithClip(AdagradWithClipConfig(lr=[0.1]), parameters)
    kind, config = FairseqAdamWithMemory, AdamWithMemoryConfig
    if "BranchWeights" in names:
        kind, config = FairseqAdamWithBranchWeights, FairseqAdamConfig
    return kind(config(**ADAM), parameters)


def test_split_batch_needs_no_number(monkeypatch):
    sample = make_batch(tiny.tiny_transformer_xl(), "meta") | PADDED
    sample["net_input"] |= {"pasts": EnsemblePasts(), "start": 0}
    with numbers_read(monkeypatch) as asked:
        parts = split_batch(sample, 2)
    assert [part["ntokens"] for part in parts] == [8, 7]
    assert asked == {}


@pytest.mark.parametrize("case", CASES)
def test_an_update_makes_the_host_wait_only_where_it_must(case, monkeypatch):
    build, criterion = CASES[case]
    with torch.device("meta"):
        # some of fairseq's buffers start on the CPU
        model = build().to("meta").bfloat16().train()
    criterion = build_criterion(criterion).train()
    optimizer = build_optimizer(model)
    sample = make_batch(model, "meta")
    pasts = EnsemblePasts() if hasattr(model.decoder, "network") else None
    with numbers_read(monkeypatch) as asked:
        for update in range(2):
            asked.clear()
            if pasts is not None:
                sample |= PADDED
                sample["net_input"] |= {"pasts": pasts, "start": 8 * update}
            loss, _, _ = criterion(model, sample)
            optimizer.backward(loss)
            optimizer.clip_grad_norm(0.25)
            optimizer.step()
            apply_constraints(optimizer, model)
            optimizer.zero_grad()
    clips = {NORM_READ: 1} if getattr(optimizer, "tables", []) else {}
    assert set(asked) <= WAITS
    # a memory counts the rows that were read
    counted = {name: times for name, times in asked.items() if name != ROWS_READ}
    assert counted == OFTEN.get(case, {}) | clips
    assert {x.device.type for x in [*model.parameters(), *model.buffers()]} == {"meta"}
