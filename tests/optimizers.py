"""fairseq's optimizers with their options, in a given precision."""

import functools
from unittest import mock

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import (
    AMPOptimizer,
    FP16Optimizer,
    MemoryEfficientFP16Optimizer,
    build_optimizer,
)
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import OmegaConf

# fairseq's option, the dtype of the weights, other options
EACH_PRECISION = pytest.mark.parametrize(
    ("precision", "dtype", "common"),
    [
        (None, torch.float32, {}),
        ("amp", torch.float32, {}),
        ("bf16", torch.bfloat16, {}),
        ("fp16", torch.float16, {}),
        ("fp16", torch.float16, {"memory_efficient_fp16": True}),
    ],
)
LOSS_SCALES = {None: 1, "bf16": 1, "amp": 4, "fp16": 4}


def adam_options(config=FairseqAdamConfig, **values):
    values = {"lr": [1e-3], "adam_betas": "(0.9, 0.98)", "tpu": False, **values}
    return OmegaConf.merge(OmegaConf.structured(config), values)


def in_precision(options, parameters, precision=None, **common):
    """Build an optimizer, inside fairseq's wrapper for amp, bf16 or fp16."""
    if precision is None:
        return build_optimizer(options, parameters)
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.common.update({precision: True, "fp16_no_flatten_grads": True, **common})
    cfg.common.fp16_init_scale = LOSS_SCALES[precision]
    cfg.optimizer = options
    kind = AMPOptimizer if precision == "amp" else FP16Optimizer
    if common.get("memory_efficient_fp16"):
        kind = MemoryEfficientFP16Optimizer
    parameters = list(parameters)
    # torch's scaler for GPUs does nothing on a CPU; the one for CPUs scales in the same way
    scaler = functools.partial(torch.amp.GradScaler, parameters[0].device.type)
    with mock.patch.object(torch.cuda.amp, "GradScaler", scaler):
        return kind.build_optimizer(cfg, parameters)
