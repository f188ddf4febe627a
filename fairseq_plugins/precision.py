"""Modules that stay in single precision when a model is cast to half precision."""

from __future__ import annotations

from collections.abc import Callable

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
