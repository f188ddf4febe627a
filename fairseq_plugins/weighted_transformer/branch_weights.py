"""The weights κ and α of attention branches: on the simplex, with a schedule of their own.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), sections 3, 4.1, 4.4 and 4.5.

Shapes: M branches.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.optimizers import UpdateRule, set_update_rule
from fairseq_plugins.fairseq_integration.precision import SinglePrecision

PARAMETERIZATIONS = ("simplex", "softmax")
# what weighs the branches outside of training (section 4.4, table 3)
REPLACEMENTS = LEARNED, RANDOM, UNIFORM = ("learned", "random", "uniform")


@torch.no_grad()
def project_to_simplex(x: Tensor) -> None:
    """Replace ``x`` (M,) by the nearest vector on the simplex: no number below 0, a sum of 1."""
    falling = x.double().sort(descending=True).values
    # what is to be taken from each of the 1, 2, … largest numbers, if the others become 0
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(x) + 1, device=x.device)
    # it rises with each number that stays above 0, and falls after those
    x.copy_((x.double() - excess.max()).clamp(min=0))


def draw_from_simplex(branches: int) -> Tensor:
    """Return weights (M,) drawn uniformly from the simplex."""
    drawn = torch.empty(branches, dtype=torch.double).exponential_()
    return (drawn / drawn.sum()).float()


@dataclass(eq=False)
class BranchSchedule(UpdateRule):
    """How the κ and α of one attention are trained (section 4.1).

    The learning rate is ``factor · min(t^-0.5, t · warmup^-1.5)`` at update t, from 1.

    Args:
        factor: (d_model/N)^-0.5 for N layers.
        warmup: number of updates.
        freeze_after: number of updates after which the weights stay as they are; None for never.
        projected: whether they are projected to the simplex after each update.

    Attributes:
        followed: whether an optimizer follows this schedule; that optimizer sets it.
    """

    factor: float
    warmup: int
    freeze_after: int | None = None
    projected: bool = True
    followed: bool = field(default=False, init=False)

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of an update, counted from 1."""
        return self.factor * min(update**-0.5, update * self.warmup**-1.5)

    def frozen(self, update: int) -> bool:
        """Return whether an update, counted from 1, leaves the weights as they are."""
        return self.freeze_after is not None and update > self.freeze_after


class BranchWeights(SinglePrecision):
    """κ and α of one attention, both (M,): not negative, with sums of 1 (equations 6 and 7).

    They start at random places of the simplex. The parameters are ``kappa`` and ``alpha``, which
    are to be projected after each update (:func:`project_to_simplex`). With the parameterization
    "softmax" they are logits, ``kappa_logits`` and ``alpha_logits``, and need no projection.

    Args:
        branches: M.
        schedule: how :class:`AdamWithBranchWeights` trains them; None for another optimizer.
        parameterization: "simplex", or "softmax" for weights that are the softmax of logits.
        outside_training: what replaces the learned weights outside of training (section 4.4):
            "learned" for nothing, "random" for other random weights, "uniform" for 1/M.
        top_k: number of branches that contribute, those with the largest α (section 4.5); None for
            all.

    Raises:
        ValueError: a choice is unknown, ``top_k`` is not from 1 to M, or it would choose among
            equal weights.
    """

    def __init__(
        self,
        branches: int,
        schedule: BranchSchedule | None = None,
        parameterization: str = "simplex",
        outside_training: str = LEARNED,
        top_k: int | None = None,
    ) -> None:
        super().__init__()
        for argument, value, known in [
            ("parameterization", parameterization, PARAMETERIZATIONS),
            ("outside_training", outside_training, REPLACEMENTS),
        ]:
            if value not in known:
                raise ValueError(f"`{argument}` is {value!r}: there are {', '.join(known)}")
        if top_k is not None and not 1 <= top_k <= branches:
            raise ValueError(
                f"`top_k` is {top_k}: it must be from 1 to the number of branches, {branches}"
            )
        if top_k is not None and outside_training == UNIFORM:
            raise ValueError(
                "`outside_training` uniform with `top_k`: no weight is larger than another; leave "
                "out one of the two"
            )
        self.branches = branches
        self.softmax = parameterization == "softmax"
        self.outside_training = outside_training
        self.top_k = top_k
        self.schedule = schedule
        for name in self._names:
            drawn = draw_from_simplex(branches)
            parameter = nn.Parameter(drawn.log() if self.softmax else drawn)
            if schedule is not None:
                set_update_rule(parameter, schedule)
            setattr(self, name, parameter)
        if outside_training == RANDOM:
            for name in ("random_kappa", "random_alpha"):
                self.register_buffer(name, draw_from_simplex(branches), persistent=False)

    @property
    def _names(self) -> tuple[str, str]:
        # one pair of names for both would let logits be loaded as weights, and weights as logits
        return ("kappa_logits", "alpha_logits") if self.softmax else ("kappa", "alpha")

    def learned(self) -> tuple[Tensor, Tensor]:
        """Return the learned κ and α, both (M,), of all branches."""
        kappa, alpha = (getattr(self, name) for name in self._names)
        return (kappa.softmax(0), alpha.softmax(0)) if self.softmax else (kappa, alpha)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return κ and α, both (M,); α is 0 for branches that do not contribute."""
        kappa, alpha = self.learned()
        if not self.training and self.outside_training == RANDOM:
            kappa, alpha = self.random_kappa, self.random_alpha
        elif not self.training and self.outside_training == UNIFORM:
            kappa = alpha = torch.full_like(kappa, 1 / self.branches)
        if self.top_k is not None:
            best = alpha.topk(self.top_k).indices
            alpha = alpha * torch.zeros_like(alpha).scatter(0, best, 1)
        return kappa, alpha
