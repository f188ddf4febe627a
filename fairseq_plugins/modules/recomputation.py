"""Whether a forward pass is one that activation checkpointing runs a second time."""

import torch


def is_recomputed() -> bool:
    """Return whether this is within a backward pass, which computes activations again.

    What counts passes, such as running statistics, has counted this one before.
    """
    return torch._C._current_graph_task_id() != -1
