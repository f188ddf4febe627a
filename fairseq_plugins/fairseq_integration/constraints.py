"""Constraints on parameters, such as spans within [0, 1], that hold after every update.

With ``--fp16`` and ``--bf16`` fairseq's optimizer works on a copy of the weights in fp32 and
overwrites the model's with it: what is projected in the model alone is undone by the next update.
Here the optimizer's copy is projected, and then copied into the model.

A module with constraints has a method ::

    def constrained(self) -> Iterable[tuple[nn.Parameter, Callable[[Tensor], None]]]

whose callables project a tensor of their parameter's shape in place. The dtype is that of the
optimizer's copy.
"""

import torch
from fairseq.optim import (
    AMPOptimizer,
    FairseqOptimizer,
    FP16Optimizer,
    MemoryEfficientFP16Optimizer,
)
from torch import Tensor, nn


@torch.no_grad()
def apply_constraints(optimizer: FairseqOptimizer, model: nn.Module) -> None:
    """Project the constrained parameters of ``model``, where the optimizer keeps them and in it.

    Call it after each update. Parameters that require no gradient stay as they are.

    Args:
        optimizer: fairseq's, with the wrapper that the precision brings.
        model: the model, which may be wrapped for several workers.

    Raises:
        ValueError: the model has constraints, and the optimizer keeps its parameters in an unknown
            way or does not have one of them.
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
    held = _held_by(optimizer)
    if held is None:
        raise ValueError(
            f"{_name(optimizer)} keeps its parameters in a way that the constraints of "
            f"{_name(constraints[0][0])} do not know: leave out the option that brings it "
            "(--use-bmuf for FairseqBMUF)"
        )
    for module, parameter, project in constraints:
        if id(parameter) not in held:
            raise ValueError(
                f"{_name(optimizer)} does not have a parameter of {_name(module)}, of shape "
                f"{tuple(parameter.shape)}, that has a constraint: set its requires_grad before "
                "the optimizer is built, and use another --ddp-backend than fully_sharded"
            )
        master = held[id(parameter)]
        project(master)
        if master is not parameter:
            parameter.copy_(master)


def _held_by(optimizer: FairseqOptimizer) -> dict[int, Tensor] | None:
    """Return the optimizer's own copy of each parameter, by the parameter's id; None if unknown."""
    if isinstance(optimizer, FP16Optimizer):
        if optimizer.has_flat_params:
            return _flat_pieces(optimizer)
        pairs = zip(optimizer.fp16_params, optimizer.fp32_params, strict=True)
        return {id(parameter): master for parameter, master in pairs}
    shared = isinstance(optimizer, (AMPOptimizer, MemoryEfficientFP16Optimizer))
    if shared or isinstance(getattr(optimizer, "_optimizer", None), torch.optim.Optimizer):
        return {id(parameter): parameter for parameter in optimizer.params}
    return None


def _flat_pieces(optimizer: FP16Optimizer) -> dict[int, Tensor]:
    """Return views of fairseq's flat copies: one tensor a device, its parameters end to end.

    The order is that of ``fp16_params``, whether or not they require a gradient by now.
    """
    pieces = {}
    for device, flat in optimizer.fp32_params.items():
        parameters = [p for p in optimizer.fp16_params if p.device.index == device]
        for parameter, piece in zip(
            parameters, flat.split([p.numel() for p in parameters]), strict=True
        ):
            pieces[id(parameter)] = piece.view_as(parameter)
    return pieces


def _name(thing: object) -> str:
    return type(thing).__name__
