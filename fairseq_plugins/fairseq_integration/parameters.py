"""Optimizers with update rules for single parameters, and parameters with constraints.

With ``--fp16`` and ``--bf16`` fairseq updates a copy of the weights in fp32 and overwrites the
model's weights with it. Constraints therefore project this copy, and the model gets the result.

A module with constraints has a method ::

    def constrained(self) -> Iterable[tuple[nn.Parameter, Callable[[Tensor], None]]]

Each callable projects a tensor in place; it has its parameter's shape and the copy's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fairseq.optim import (
    AMPOptimizer,
    FairseqOptimizer,
    FP16Optimizer,
    MemoryEfficientFP16Optimizer,
)
from fairseq.optim.adam import FairseqAdamConfig
from torch import Tensor, nn


class OwnRulesStep:
    """Base class of optimizers with rules for single tensors; list it before fairseq's class.

    Under ``--amp`` fairseq's AMPOptimizer unscales the gradients to take their norm. torch's scaler
    then gets this object, and would unscale the gradients again, so that none would be clipped.
    """

    # a flat copy of all parameters has no such rules
    supports_flat_params = False

    # lets the scaler leave the gradients alone, and call step() even if some are not finite
    _step_supports_amp_scaling = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the parameters, unless under ``--amp`` a gradient is not finite."""
        # the scaler sets this tensor; reading it waits for the device, as the scaler would
        if not getattr(self, "found_inf", False):
            super().step(*args, **kwargs)


def adam_options(cfg: FairseqAdamConfig) -> dict[str, Any]:
    """Return the options of fairseq's ``adam`` as torch's optimizers take them."""
    if cfg.fp16_adam_stats:
        raise ValueError("--fp16-adam-stats with this --optimizer: leave it out")
    return {
        "lr": cfg.lr[0],
        "betas": parse_betas("--adam-betas", cfg.adam_betas),
        "eps": cfg.adam_eps,
        "weight_decay": cfg.weight_decay,
    }


def parse_betas(option: str, betas: str | Sequence[float]) -> tuple[float, ...]:
    """Return Adam's betas from the value of an option, such as "(0.9,0.98)"."""
    numbers = betas.strip("()[] ").split(",") if isinstance(betas, str) else betas
    values = tuple(float(number) for number in numbers)
    if len(values) != 2 or not all(0 <= value < 1 for value in values):
        raise ValueError(f"{option} is {betas}: it must be two numbers in [0, 1), as (0.9,0.98)")
    return values


@torch.no_grad()
def apply_constraints(optimizer: FairseqOptimizer, model: nn.Module) -> None:
    """Project the constrained parameters after an update, in the optimizer's copy and the model.

    Optimizer and model may be wrapped. Parameters without a gradient stay as they are.
    """
    constraints = [
        (module, parameter, project)
        for module in model.modules()
        if hasattr(type(module), "constrained")
        for parameter, project in module.constrained()
        if parameter.requires_grad
    ]
    if not constraints:
        return
    masters = _find_masters(optimizer)
    name = type(optimizer).__name__
    if masters is None:
        raise ValueError(
            f"{name} keeps its parameters in a way that the constraints of "
            f"{type(constraints[0][0]).__name__} do not support: leave out its option (--use-bmuf "
            "for FairseqBMUF)"
        )
    for module, parameter, project in constraints:
        if id(parameter) not in masters:
            raise ValueError(
                f"{name} does not have a parameter of {type(module).__name__}, of shape "
                f"{tuple(parameter.shape)}, that has a constraint: set its requires_grad before "
                "the optimizer is built, and use another --ddp-backend than fully_sharded"
            )
        master = masters[id(parameter)]
        project(master)
        if master is not parameter:
            parameter.copy_(master)


def _find_masters(optimizer: FairseqOptimizer) -> dict[int, Tensor] | None:
    """Return the tensors that the optimizer updates, by the parameters' ids; None if unknown."""
    if isinstance(optimizer, FP16Optimizer):
        if optimizer.has_flat_params:
            return _split_flat_copies(optimizer)
        pairs = zip(optimizer.fp16_params, optimizer.fp32_params, strict=True)
        return {id(parameter): master for parameter, master in pairs}
    shared = isinstance(optimizer, (AMPOptimizer, MemoryEfficientFP16Optimizer))
    if shared or isinstance(getattr(optimizer, "_optimizer", None), torch.optim.Optimizer):
        return {id(parameter): parameter for parameter in optimizer.params}
    return None


def _split_flat_copies(optimizer: FP16Optimizer) -> dict[int, Tensor]:
    """Return views of each parameter's part of fairseq's flat copies, by the parameters' ids.

    A flat copy holds all of a device's ``fp16_params`` end to end.
    """
    pieces = {}
    for device, flat in optimizer.fp32_params.items():
        parameters = [p for p in optimizer.fp16_params if p.device.index == device]
        sizes = [p.numel() for p in parameters]
        for parameter, piece in zip(parameters, flat.split(sizes), strict=True):
            pieces[id(parameter)] = piece.view_as(parameter)
    return pieces
