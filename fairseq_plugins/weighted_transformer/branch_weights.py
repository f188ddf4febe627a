"""The weights κ and α of attention branches: on the simplex, with a learning rate of their own.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), sections 3, 4.1, 4.4 and 4.5.

Shapes: M branches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.precision import SinglePrecision

PARAMETERIZATIONS = ("simplex", "softmax")
# what weighs the branches outside of training (table 3)
REPLACEMENTS = LEARNED, RANDOM, UNIFORM = ("learned", "random", "uniform")


@torch.no_grad()
def project_to_simplex(x: Tensor) -> None:
    """Replace ``x`` (M,) by the nearest vector of no negative numbers whose sum is 1."""
    falling = x.double().sort(descending=True).values
    # how much all numbers are too large, if the first 1, 2, … of them are to stay above 0
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(x) + 1, device=x.device)
    # it rises with each number that stays above 0, and then falls
    x.copy_((x.double() - excess.max()).clamp(min=0))


def draw_from_simplex(branches: int) -> Tensor:
    """Return weights (M,) drawn uniformly from the simplex."""
    drawn = torch.empty(branches, dtype=torch.double).exponential_()
    return (drawn / drawn.sum()).float()


@dataclass
class BranchSchedule:
    """How κ and α are trained; the attribute ``param_group`` tells the optimizer (section 4.1).

    The learning rate is ``factor · min(t^-0.5, t · warmup^-1.5)`` at update t, from 1.

    Args:
        factor: (d_model/N)^-0.5 for N layers.
        warmup: number of updates.
        freeze_after: number of updates after which the weights stay as they are; None for never.
        projected: whether they are projected to the simplex after each update.
        taken: whether an optimizer follows this schedule.
    """

    factor: float
    warmup: int
    freeze_after: int | None = None
    projected: bool = True
    taken: bool = False

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 1."""
        return self.factor * min(update**-0.5, update * self.warmup**-1.5)

    def frozen(self, update: int) -> bool:
        """Return whether an update, counted from 1, leaves the weights as they are."""
        return self.freeze_after is not None and update > self.freeze_after


class BranchWeights(SinglePrecision):
    """κ and α of one attention, both (M,): not negative, with sums of 1 (equations 6 and 7).

    They start at random places of the simplex, and are held in ``kappa`` and ``alpha``; with the
    softmax as parameterisation ``kappa_logits`` and ``alpha_logits`` are held in their place.

    Args:
        branches: M.
        schedule: how they are trained.
        parameterization: "simplex", or "softmax" for the alternative.
        outside_training: "learned"; "random" for other random weights and "uniform" for 1/M, which
            replace the learned ones where the module is not in training (section 4.4).
        top_k: only the branches with the k largest α contribute (section 4.5); None for all.

    Raises:
        ValueError: a choice is unknown, ``top_k`` is not from 1 to M, or it is to choose among
            equal weights.
    """

    def __init__(
        self,
        branches: int,
        schedule: BranchSchedule,
        parameterization: str = "simplex",
        outside_training: str = LEARNED,
        top_k: int | None = None,
    ) -> None:
        super().__init__()
        for option, value, known in [
            ("branch-parameterization", parameterization, PARAMETERIZATIONS),
            ("branch-weights", outside_training, REPLACEMENTS),
        ]:
            if value not in known:
                raise ValueError(f"--{option} is {value!r}: there are {', '.join(known)}")
        if top_k is not None and not 1 <= top_k <= branches:
            raise ValueError(
                f"--branch-top-k is {top_k}: it must be from 1 to the number of branches, "
                f"{branches}"
            )
        if top_k is not None and outside_training == UNIFORM:
            raise ValueError(
                "--branch-weights uniform with --branch-top-k: no weight is larger than another; "
                "leave out one of the two (that of a trained model by --model-overrides "
                "\"{'branch_weights': 'uniform', 'branch_top_k': None}\")"
            )
        self.branches = branches
        self.softmax = parameterization == "softmax"
        self.outside_training = outside_training
        self.top_k = top_k
        self.schedule = schedule
        for name in self._names:
            drawn = draw_from_simplex(branches)
            parameter = nn.Parameter(drawn.log() if self.softmax else drawn)
            parameter.param_group = schedule
            setattr(self, name, parameter)
        if outside_training == RANDOM:
            for name in ("random_kappa", "random_alpha"):
                self.register_buffer(name, draw_from_simplex(branches), persistent=False)

    @property
    def _names(self) -> tuple[str, str]:
        # other names: weights would pass for logits, and logits for weights, when they are loaded
        return ("kappa_logits", "alpha_logits") if self.softmax else ("kappa", "alpha")

    def learned(self) -> tuple[Tensor, Tensor]:
        """Return the learned κ and α, both (M,), of all branches."""
        kappa, alpha = (getattr(self, name) for name in self._names)
        return (kappa.softmax(0), alpha.softmax(0)) if self.softmax else (kappa, alpha)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return κ and α, both (M,), α with zeros for branches that do not contribute."""
        kappa, alpha = self.learned()
        if not self.training and self.outside_training == RANDOM:
            kappa, alpha = self.random_kappa, self.random_alpha
        elif not self.training and self.outside_training == UNIFORM:
            kappa = alpha = torch.full_like(kappa, 1 / self.branches)
        if self.top_k is not None:
            best = alpha.topk(self.top_k).indices
            alpha = alpha * torch.zeros_like(alpha).scatter(0, best, 1)
        return kappa, alpha
