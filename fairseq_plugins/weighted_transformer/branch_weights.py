"""The weights κ and α of branches, which stay on the simplex and have their own schedule.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), sections 3, 4.1, 4.4 and 4.5.

Shapes: M branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.forward_passes import InferenceCache
from fairseq_plugins.fairseq_integration.parameters import (
    Float32Module,
    UpdateRule,
    set_update_rule,
)

PARAMETERIZATIONS = ("simplex", "softmax")
# the weights outside of training (section 4.4, table 3)
REPLACEMENTS = LEARNED, RANDOM, UNIFORM = ("learned", "random", "uniform")
STARTS = RANDOM, NEAR_UNIFORM = ("random", "near-uniform")
KINDS = ("kappa", "alpha")


@torch.no_grad()
def project_to_simplex(x: Tensor) -> None:
    """Replace ``x`` (M,) by the nearest vector of numbers ≥ 0 that sum to 1."""
    falling = x.double().sort(descending=True).values
    # what to subtract from the 1, 2, … largest numbers if all others become 0
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(x) + 1, device=x.device)
    # the excess rises as long as all these numbers stay above 0, and falls afterwards
    x.copy_((x.double() - excess.max()).clamp(min=0))


def draw_from_simplex(branches: int, device: torch.device | None = None) -> Tensor:
    """Return weights (M,) drawn uniformly from the simplex."""
    drawn = torch.empty(branches, dtype=torch.double, device=device).exponential_()
    return (drawn / drawn.sum()).float()


def draw_near_uniform(branches: int) -> Tensor:
    """Return weights (M,) near 1/M in random order, the largest twice the smallest.

    Sorted, they rise by equal factors. The paper's trained weights spread as much (figure 3).
    """
    rising = torch.linspace(0, 1, branches, dtype=torch.double).exp2()
    return (rising[torch.randperm(branches)] / rising.sum()).float()


@dataclass(eq=False)
class BranchSchedule(UpdateRule):
    """How κ and α of one layer are trained (section 4.1).

    The learning rate of update t, from 1, is ``factor · min(t^-0.5, t · warmup^-1.5)``; the paper's
    factor is (d_model/N)^-0.5 for N layers. After ``freeze_after`` updates the weights stay. An
    optimizer that follows the schedule sets ``followed``, and projects the weights to the simplex
    if they are ``projected``.
    """

    factor: float
    warmup: int
    freeze_after: int | None = None
    projected: bool = True
    followed: bool = field(default=False, init=False)

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of update ``update``, from 1."""
        return self.factor * min(update**-0.5, update * self.warmup**-1.5)

    def frozen(self, update: int) -> bool:
        """Return whether update ``update``, from 1, leaves the weights as they are."""
        return self.freeze_after is not None and update > self.freeze_after


class BranchWeights(Float32Module):
    """κ and α, both (M,), not negative, each with a sum of 1 (equations 6 and 7).

    The optimizer must project the parameters ``kappa`` and ``alpha`` after each update
    (:func:`project_to_simplex`). The parameterization "softmax" has ``kappa_logits`` and
    ``alpha_logits`` instead, and needs no projection.

    Args:
        schedule: how :class:`AdamWithBranchWeights` trains them; None for another optimizer.
        outside_training: which weights inference uses: "learned", "random" or "uniform" (section
            4.4).
        top_k: only the k branches with the largest α contribute, or with the largest κ if there is
            no α (section 4.5).
        start: "random" for a random point of the simplex, or "near-uniform".
        applied_sum: what the weights sum to when they are applied, 1 or M.
        shake: draw new weights in each forward pass of training; inference uses 1/M (section 4.4).
        kinds: "kappa", "alpha", or both.
    """

    def __init__(
        self,
        branches: int,
        schedule: BranchSchedule | None = None,
        parameterization: str = "simplex",
        outside_training: str = LEARNED,
        top_k: int | None = None,
        start: str = RANDOM,
        applied_sum: int = 1,
        shake: bool = False,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        super().__init__()
        for argument, value, known in [
            ("parameterization", parameterization, PARAMETERIZATIONS),
            ("outside_training", outside_training, REPLACEMENTS),
            ("start", start, STARTS),
        ]:
            if value not in known:
                raise ValueError(f"`{argument}` is {value!r}: there are {', '.join(known)}")
        if top_k is not None and not 1 <= top_k <= branches:
            raise ValueError(
                f"`top_k` is {top_k}: it must be from 1 to the number of branches, {branches}"
            )
        if top_k is not None and (shake or outside_training == UNIFORM):
            other = "`shake`" if shake else "`outside_training` uniform"
            raise ValueError(
                f"{other} with `top_k`: no weight is larger than another; leave out one of the two"
            )
        self.branches = branches
        self.softmax = parameterization == "softmax"
        self.outside_training = outside_training
        self.top_k = top_k
        self.applied_sum = applied_sum
        self.shake = shake
        # weights that are drawn anew are not trained
        self.schedule = None if shake else schedule
        self.kinds = tuple(kinds)
        for name in self._names:
            if shake:
                drawn = torch.full((branches,), 1 / branches)
            else:
                draw = draw_from_simplex if start == RANDOM else draw_near_uniform
                drawn = draw(branches)
            parameter = nn.Parameter(drawn.log() if self.softmax else drawn, not shake)
            if self.schedule is not None:
                set_update_rule(parameter, self.schedule)
            setattr(self, name, parameter)
        if outside_training == RANDOM:
            for kind in self.kinds:
                self.register_buffer(
                    f"random_{kind}", draw_from_simplex(branches), persistent=False
                )

    @property
    def _names(self) -> tuple[str, ...]:
        # different names keep logits from being loaded as weights and the other way round
        return tuple(f"{kind}_logits" if self.softmax else kind for kind in self.kinds)

    def equal(self) -> dict[str, Tensor]:
        """Return a state in which all weights are 1/M."""
        return {name: torch.full((self.branches,), 1 / self.branches) for name in self._names}

    def learned(self) -> tuple[Tensor, ...]:
        """Return the learned weights (M,) of each kind."""
        learned = (getattr(self, name) for name in self._names)
        return tuple(x.softmax(0) if self.softmax else x for x in learned)

    def forward(self) -> tuple[Tensor, ...]:
        """Return the weights (M,) of each kind as they are applied."""
        weights = dict(zip(self.kinds, self.learned(), strict=True))
        for kind, learned in weights.items():
            if self.training and self.shake:
                weights[kind] = draw_from_simplex(self.branches, learned.device)
            elif not self.training and self.outside_training == RANDOM:
                weights[kind] = getattr(self, f"random_{kind}")
            elif not self.training and self.outside_training == UNIFORM:
                weights[kind] = torch.full_like(learned, 1 / self.branches)
        if self.top_k is not None:
            kind = "alpha" if "alpha" in weights else "kappa"
            best = weights[kind].topk(self.top_k).indices
            weights[kind] = weights[kind] * torch.zeros_like(weights[kind]).scatter(0, best, 1)
        if self.applied_sum == 1:
            return tuple(weights.values())
        return tuple(x * self.applied_sum for x in weights.values())


class FoldedLayer(nn.Module):
    """Base class of layers that fold κ and α into their matrices; inference does it once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._folded: InferenceCache[tuple[Tensor, ...]] = InferenceCache()

    def fold(self) -> tuple[Tensor, ...]:
        """Return matrices and biases, multiplied by κ and α."""
        raise NotImplementedError

    def folded(self) -> tuple[Tensor, ...]:
        """Return what :meth:`fold` returns, from a cache in inference."""
        if self.training or torch.is_grad_enabled():
            return self.fold()
        return self._folded.get(self.parameters(), self._fold_for_all_precisions)

    def _fold_for_all_precisions(self) -> tuple[Tensor, ...]:
        # the next pass may run under a different autocast
        with torch.autocast(next(self.parameters()).device.type, enabled=False):
            return self.fold()

    def train(self, mode: bool = True) -> FoldedLayer:
        """Set the module in training mode or out of it."""
        if mode:
            # an optimizer is about to change the weights without autograd's knowledge
            self._folded.clear()
        return super().train(mode)
