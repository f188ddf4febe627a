"""First layers of all branches at once, from heads side by side to inner vectors side by side.

A batched product whose results lie one after the other would have to be copied between the layouts
forward and backward: this one reads and writes each branch's columns in place. On a CPU a whole
model trains about a seventh faster for it.

Shapes: N tokens, M branches, h head width, f inner width of a branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def branch_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return ``x_i weight_i + bias_i`` of each branch i: (N, M·h), (M, h, f), (M, f) -> (N, M·f).

    Under autocast the product is of its dtype, like that of any linear layer. There are gradients,
    but none of gradients, nor those of torch.func.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.double:
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    return _BranchLinear.apply(x, weight, bias)


def _by_branch(x: Tensor, branches: int) -> Tensor:
    # (N, M·w) -> (M, N, w), a view
    return x.unflatten(1, (branches, -1)).transpose(0, 1)


class _BranchLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        branches = len(weight)
        result = x.new_empty(len(x), bias.numel())
        torch.baddbmm(
            bias.unsqueeze(1), _by_branch(x, branches), weight, out=_by_branch(result, branches)
        )
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        branches = len(weight)
        grads = _by_branch(grad, branches)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            torch.bmm(grads, weight.mT, out=_by_branch(grad_x, branches))
        if ctx.needs_input_grad[1]:
            # (M, h, N), (M, N, f) -> (M, h, f)
            grad_weight = torch.bmm(_by_branch(x, branches).mT, grads)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0).unflatten(0, (branches, -1))
        return grad_x, grad_weight, grad_bias
