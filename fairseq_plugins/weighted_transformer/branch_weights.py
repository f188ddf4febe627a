"""The weights κ and α of branches, which stay on the simplex and have their own schedule.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), sections 3, 4.1, 4.4 and 4.5.

Shapes: M branches.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.parameters import (
    Float32Module,
    UpdateRule,
    set_update_rule,
)

PARAMETERIZATIONS = ("simplex", "softmax")
# the weights outside of training (section 4.4, table 3)
REPLACEMENTS = LEARNED, RANDOM, UNIFORM = ("learned", "random", "uniform")
STARTS = RANDOM, NEAR_UNIFORM = ("random", "near-uniform")


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

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle, which no optimizer follows yet."""
        vars(self).update(state, followed=False)

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of update ``update``, from 1."""
        return self.factor * min(update**-0.5, update * self.warmup**-1.5)

    def frozen(self, update: int) -> bool:
        """Return whether update ``update``, from 1, leaves the weights as they are."""
        return self.freeze_after is not None and update > self.freeze_after


class BranchWeights(Float32Module):
    """κ or α of M branches: a vector (M,), not negative, with a sum of 1 (equations 6 and 7).

    The optimizer must project the parameter after each update (:func:`project_to_simplex`). The
    parameterization "softmax" has logits instead, and needs no projection.

    Args:
        name: the parameter's name, "kappa" or "alpha"; logits are "kappa_logits".
        schedule: how :class:`AdamWithBranchWeights` trains them; None for another optimizer.
        start: "near-uniform", or "random" for a random point of the simplex.
        total: what the weights sum to when they are applied; M by default.
        top_k: only the k branches with the largest weights contribute (section 4.5).
        shake: draw new weights in each forward pass of training; inference uses 1/M (section 4.4).
        outside_training: which weights inference uses: "learned", "random" or "uniform" (section
            4.4).
    """

    def __init__(
        self,
        branches: int,
        name: str = "alpha",
        schedule: BranchSchedule | None = None,
        parameterization: str = "simplex",
        start: str = NEAR_UNIFORM,
        total: int | None = None,
        top_k: int | None = None,
        shake: bool = False,
        outside_training: str = LEARNED,
    ) -> None:
        super().__init__()
        for argument, value, known in [
            ("parameterization", parameterization, PARAMETERIZATIONS),
            ("start", start, STARTS),
            ("outside_training", outside_training, REPLACEMENTS),
        ]:
            if value not in known:
                raise ValueError(f"`{argument}` is {value!r}: there are {', '.join(known)}")
        if branches < 1:
            raise ValueError(f"`branches` is {branches}: it must be at least 1")
        if top_k is not None and not 1 <= top_k <= branches:
            raise ValueError(
                f"`top_k` is {top_k}: it must be from 1 to the number of branches, {branches}"
            )
        if top_k is not None and (shake or outside_training == UNIFORM):
            raise ValueError(
                f"`top_k` is {top_k}, and `{'shake' if shake else 'outside_training'}` makes all "
                "weights equal: leave out one of the two"
            )
        self.branches = branches
        self.total = branches if total is None else total
        self.softmax = parameterization == "softmax"
        self.top_k = top_k
        self.shake = shake
        self.outside_training = outside_training
        # weights that are drawn anew are not trained
        self.schedule = None if shake else schedule
        if shake:
            weights = self.uniform()
        else:
            weights = (draw_from_simplex if start == RANDOM else draw_near_uniform)(branches)
        parameter = nn.Parameter(weights.log() if self.softmax else weights, not shake)
        if self.schedule is not None:
            set_update_rule(parameter, self.schedule)
        # another name keeps logits from being loaded as weights and the other way round
        self.name = f"{name}_logits" if self.softmax else name
        self.register_parameter(self.name, parameter)
        if outside_training == RANDOM:
            self.register_buffer("random", draw_from_simplex(branches), persistent=False)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or a pickle, whose optimizer has to follow the schedule anew."""
        super().__setstate__(state)
        if self.schedule is not None:
            # torch copies parameters without their marks
            set_update_rule(getattr(self, self.name), self.schedule)

    def uniform(self, device: torch.device | None = None) -> Tensor:
        """Return the weights 1/M, (M,)."""
        return torch.full((self.branches,), 1 / self.branches, device=device)

    def learned(self) -> Tensor:
        """Return the learned weights (M,)."""
        parameter = getattr(self, self.name)
        return parameter.softmax(0) if self.softmax else parameter

    def forward(self) -> Tensor:
        """Return the weights (M,) as they are applied, with sum ``total``."""
        weights = self.learned()
        if self.training and self.shake:
            weights = draw_from_simplex(self.branches, weights.device)
        elif not self.training and self.outside_training == RANDOM:
            weights = self.random
        elif not self.training and self.outside_training == UNIFORM:
            weights = self.uniform(weights.device)
        if self.top_k is not None:
            best = weights.topk(self.top_k).indices
            weights = weights * torch.zeros_like(weights).scatter(0, best, 1)
        return weights if self.total == 1 else weights * self.total
