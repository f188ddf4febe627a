"""How many operations matrix products take, whichever of PyTorch's functions computes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, bmm_flop


def in_place(_, left, right, **how):
    """Floating-point operations of ``x.baddbmm_(left, right)``, from shapes."""
    return bmm_flop(left, right)


def fused_attention(query, key, value, *rest, **how):
    """Those of the two products of the fused attention, of (B, H, C, d_h) and (B, H, K, d_h)."""
    streams, heads, queries, width = query
    return 2 * 2 * streams * heads * queries * key[2] * width


def multiply_adds_of(work: Callable[[], Any]) -> int:
    """Multiply-adds of the matrix products of ``work``."""
    known = {
        torch.ops.aten.baddbmm_: in_place,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: fused_attention,
    }
    with FlopCounterMode(display=False, custom_mapping=known) as counter:
        work()
    return counter.get_total_flops() // 2
