"""Checks of the sizes that layers are built with."""


def check_sizes(minimum: int, **sizes: int) -> None:
    """Refuse arguments that are below ``minimum``."""
    for name, size in sizes.items():
        if size < minimum:
            raise ValueError(f"`{name}` is {size}: it must be at least {minimum}")


def check_heads(embed_dim: int, num_heads: int) -> None:
    """Refuse a number of heads that does not divide the width."""
    check_sizes(1, embed_dim=embed_dim, num_heads=num_heads)
    if embed_dim % num_heads:
        raise ValueError(f"`num_heads` is {num_heads}: it must divide `embed_dim`, {embed_dim}")
