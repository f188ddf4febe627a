"""Checks of the numbers that layers and optimizers are built with."""

import math


def check_sizes(minimum: float, maximum: float = math.inf, **numbers: float) -> None:
    """Refuse arguments that are not finite, below ``minimum`` or above ``maximum``."""
    bounds = f"at least {minimum}, and finite"
    if maximum < math.inf:
        bounds = f"from {minimum} to {maximum}"
    for name, number in numbers.items():
        if not (minimum <= number <= maximum and math.isfinite(number)):
            raise ValueError(f"`{name}` is {number}: it must be {bounds}")


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Refuse a number of heads that does not divide the width."""
    check_sizes(1, embed_dim=embed_dim, num_heads=num_heads)
    if embed_dim % num_heads:
        raise ValueError(f"`num_heads` is {num_heads}: it must divide `embed_dim`, {embed_dim}")
