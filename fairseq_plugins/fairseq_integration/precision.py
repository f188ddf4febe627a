"""Modules that stay in single precision when the model around them is cast to a lower one."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class SinglePrecision(nn.Module):
    """What moves by less than half precision can tell apart: learned spans, running statistics.

    ``.half()`` and ``.bfloat16()`` leave its parameters and buffers as they are; moving them to
    another device, and double precision, work as ever.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SinglePrecision:
        def but_not_to_half(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            # what fn rounded is lost: start again from the tensor, moved as it is
            rounded = moved.is_floating_point() and moved.dtype.itemsize < 4
            return tensor.to(moved.device) if rounded else moved

        return super()._apply(but_not_to_half, recurse)
