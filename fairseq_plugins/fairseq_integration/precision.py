"""Modules that stay in single precision when the model around them is cast to a lower one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Float32Module(nn.Module):
    """Base class of modules that ``.half()`` and ``.bfloat16()`` leave in single precision.

    Learned spans, weights of branches and running statistics move by less than half precision can
    tell apart. Modules within stay too. Moving to another device and to double precision work as in
    any module.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Float32Module:
        def but_not_to_half(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            # fn has rounded it: start again from the tensor, on fn's device
            rounded = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if rounded else moved

        return super()._apply(but_not_to_half, recurse)
