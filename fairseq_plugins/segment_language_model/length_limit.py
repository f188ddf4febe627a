"""Generation that only its length ends.

Shapes: B prompts, K beams, V symbols.
"""

from typing import Any

import torch
from torch import Tensor, nn


def end_by_length(generator: Any) -> Any:
    """Let the symbol that ends generation cost nothing where it is all that is left, at the end.

    fairseq's generator hides all others from its search then. The symbol is none of the text: its
    log-probability is that of something which never occurs, or as good as -∞, and no sample could
    be drawn.
    """
    generator.search = _LengthLimit(generator.search, generator.eos)
    return generator


class _LengthLimit(nn.Module):
    def __init__(self, search: nn.Module, end: int) -> None:
        super().__init__()
        self.search = search
        self.end = end

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("search"), name)

    def step(self, step: int, lprobs: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Choose what comes next by log-probabilities (B, K, V), as fairseq's searches do."""
        left = lprobs.isneginf().sum(-1) == lprobs.size(-1) - 1
        of_end = lprobs[..., self.end]
        of_end.copy_(torch.where(left & of_end.isfinite(), 0.0, of_end))
        return self.search.step(step, lprobs, *args, **kwargs)
