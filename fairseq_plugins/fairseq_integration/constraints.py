"""Constraints on parameters, such as spans within [0, 1], that hold after every update.

With ``--fp16`` and ``--bf16`` fairseq's optimizer updates a copy of the weights in fp32 and then
overwrites the model's with it: a projection of the model's weights alone is undone by the next
update. Here the optimizer's copy is projected, and then copied into the model.

A module with constraints has a method ::

    def constrained(self) -> Iterable[tuple[nn.Parameter, Callable[[Tensor], None]]]

Each callable projects a tensor in place: of its parameter's shape, in the dtype of the optimizer's
copy.
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
    """Project the constrained parameters, in the optimizer's copy and in the model.

    Call it after each update. Parameters that require no gradient stay as they are.

    Args:
        optimizer: fairseq's optimizer, in the wrapper that the precision brings.
        model: the model, which may be wrapped for several workers.

    Raises:
        ValueError: the model has constraints, and the optimizer keeps its copies in an unknown way
            or lacks one of the constrained parameters.
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
    masters = _masters(optimizer)
    if masters is None:
        raise ValueError(
            f"{_name(optimizer)} keeps its parameters in a way that the constraints of "
            f"{_name(constraints[0][0])} do not know: leave out the option that brings it "
            "(--use-bmuf for FairseqBMUF)"
        )
    for module, parameter, project in constraints:
        if id(parameter) not in masters:
            raise ValueError(
                f"{_name(optimizer)} does not have a parameter of {_name(module)}, of shape "
                f"{tuple(parameter.shape)}, that has a constraint: set its requires_grad before "
                "the optimizer is built, and use another --ddp-backend than fully_sharded"
            )
        master = masters[id(parameter)]
        project(master)
        if master is not parameter:
            parameter.copy_(master)


def _masters(optimizer: FairseqOptimizer) -> dict[int, Tensor] | None:
    """Return what the optimizer updates, by the id of the model's parameter; None if unknown.

    That is a copy of the parameter, or the parameter itself.
    """
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
    """Return each parameter's piece of fairseq's flat copies, as a view, by the parameter's id.

    A flat copy holds a device's parameters end to end, in the order of ``fp16_params``, those that
    no longer require a gradient too.
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
