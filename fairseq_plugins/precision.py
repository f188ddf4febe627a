"""Modules that keep single precision in half-precision models; products without autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


class Float32Module(nn.Module):
    """Base class of modules that ``.half()`` and ``.bfloat16()`` leave in single precision.

    Spans, branch weights and running statistics change by less than half precision can represent.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Module:
        def apply_unless_half(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            # fn has rounded the tensor, so move the original instead
            rounded = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if rounded else moved

        return super()._apply(apply_unless_half, recurse)


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Return a context in which products on the device of ``x`` keep their precision."""
    # meta tensors have no autocast
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)
