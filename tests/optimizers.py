"""fairseq's optimizers with their options, in a given precision."""

import functools
from unittest import mock

import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import AMPOptimizer, FP16Optimizer, MemoryEfficientFP16Optimizer
from fairseq.optim.adam import FairseqAdamConfig
from omegaconf import OmegaConf


def adam_options(config=FairseqAdamConfig, **values):
    values = {"lr": [1e-3], "adam_betas": "(0.9, 0.98)", "tpu": False, **values}
    return OmegaConf.merge(OmegaConf.structured(config), values)


def in_precision(options, parameters, precision, **common):
    """Build an optimizer inside fairseq's wrapper for amp, bf16 or fp16."""
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.common.update({precision: True, "fp16_no_flatten_grads": True, **common})
    cfg.optimizer = options
    kind = AMPOptimizer if precision == "amp" else FP16Optimizer
    if common.get("memory_efficient_fp16"):
        kind = MemoryEfficientFP16Optimizer
    # torch's scaler for GPUs does nothing without a GPU; the one for CPUs scales in the same way
    scaler = functools.partial(torch.amp.GradScaler, "cpu")
    with mock.patch.object(torch.cuda.amp, "GradScaler", scaler):
        return kind.build_optimizer(cfg, list(parameters))
