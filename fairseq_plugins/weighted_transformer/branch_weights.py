"""The weights κ and α of branches, which stay on the simplex, and a linear layer that has them.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), sections 3, 4.1, 4.4 and 4.5.

Shapes: M branches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.precision import Float32Module
from fairseq_plugins.sizes import check_sizes

PARAMETERIZATIONS = SIMPLEX, SOFTMAX = ("simplex", "softmax")
# the weights outside of training (section 4.4, table 3)
REPLACEMENTS = LEARNED, RANDOM, UNIFORM = ("learned", "random", "uniform")
NEAR_UNIFORM = "near-uniform"
STARTS = (RANDOM, NEAR_UNIFORM)


@torch.no_grad()
def project_to_simplex(x: Tensor) -> None:
    """Replace ``x`` (M,) by the nearest vector of numbers ≥ 0 that sum to 1."""
    falling = x.double().sort(descending=True).values
    # what to subtract from the 1, 2, … largest numbers if all others become 0
    excess = (falling.cumsum(0) - 1) / torch.arange(1, len(x) + 1, device=x.device)
    # the excess rises as long as all these numbers stay above 0, and falls afterwards
    x.copy_((x.double() - excess.max()).clamp(min=0))


def learning_rate(update: int, depth: float, factor: float = 1.0, warmup: int = 400) -> float:
    """Return ``factor · depth^-0.5 · min(t^-0.5, t · warmup^-1.5)`` for update t, from 1.

    This is the rate of κ and α in section 4.1; ``depth`` is d_model/N for N layers.
    """
    return factor * depth**-0.5 * min(update**-0.5, update * warmup**-1.5)


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


def uniform_weights(branches: int) -> Tensor:
    """Return the weights 1/M, (M,)."""
    return torch.full((branches,), 1 / branches)


_DRAW = {RANDOM: draw_from_simplex, NEAR_UNIFORM: draw_near_uniform, UNIFORM: uniform_weights}


class BranchWeights(Float32Module):
    """κ or α of M branches: a vector (M,), not negative, with a sum of 1 (equations 6 and 7).

    The optimizer must project the parameter after each update (:func:`project_to_simplex`). The
    parameterization "softmax" has logits instead, and needs no projection.

    Args:
        name: the parameter's name, "kappa" or "alpha"; logits are "kappa_logits".
        start: "near-uniform", or "random" for a random point of the simplex.
        total: what the weights sum to when they are applied; with M, equal weights are those of the
            plain transformer.
        top_k: only the k branches with the largest weights contribute (section 4.5).
        shake: draw new weights in each forward pass of training; inference uses 1/M (section 4.4).
        outside_training: which weights inference uses: "learned", "random" or "uniform" (section
            4.4).
    """

    def __init__(
        self,
        branches: int,
        name: str = "alpha",
        parameterization: str = SIMPLEX,
        start: str = NEAR_UNIFORM,
        total: int = 1,
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
        check_sizes(1, branches=branches)
        check_sizes(1, branches, top_k=branches if top_k is None else top_k)
        if top_k is not None and (shake or outside_training == UNIFORM):
            raise ValueError(
                f"`top_k` is {top_k}, and `{'shake' if shake else 'outside_training'}` makes all "
                "weights equal: leave out one of the two"
            )
        self.branches = branches
        self.total = total
        self.softmax = parameterization == SOFTMAX
        self.top_k = top_k
        self.shake = shake
        weights = _DRAW[UNIFORM if shake else start](branches)
        # weights that are drawn anew are not trained
        parameter = nn.Parameter(weights.log() if self.softmax else weights, not shake)
        # another name keeps logits from being loaded as weights and the other way round
        self.name = f"{name}_logits" if self.softmax else name
        self.register_parameter(self.name, parameter)
        replacement = None if outside_training == LEARNED else _DRAW[outside_training](branches)
        self.register_buffer("replacement", replacement, persistent=False)

    def learned(self) -> Tensor:
        """Return the learned weights (M,)."""
        parameter = getattr(self, self.name)
        return parameter.softmax(0) if self.softmax else parameter

    def forward(self) -> Tensor:
        """Return the weights (M,) as they are applied, with sum ``total``."""
        if self.training and self.shake:
            weights = draw_from_simplex(self.branches, getattr(self, self.name).device)
        elif not self.training and self.replacement is not None:
            weights = self.replacement
        else:
            weights = self.learned()
        if self.top_k is not None:
            best = weights.topk(self.top_k).indices
            weights = weights * torch.zeros_like(weights).scatter(0, best, 1)
        return weights if self.total == 1 else weights * self.total


class WeightedLinear(nn.Module):
    """``Σ_i w_i (x_i W_i + b/S)``: a linear layer with a weight for each of M branches.

    Branch i has columns i·c to (i+1)·c of the matrix, where c is the input's width divided by M.
    This is not an ``nn.Linear``: the matrix is not all that the input is multiplied with.
    """

    def __init__(self, in_features: int, out_features: int, weights: BranchWeights) -> None:
        super().__init__()
        if in_features < 1 or in_features % weights.branches:
            raise ValueError(
                f"`in_features` is {in_features}, the inner width of a feed-forward network: it "
                f"must be a multiple of the number of branches, {weights.branches}"
            )
        linear = nn.Linear(in_features, out_features)
        self.weight, self.bias = linear.weight, linear.bias
        self.weights = weights

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, in_features) to (…, out_features)."""
        weights = self.weights()
        bias = (self.bias * (weights.sum() / self.weights.total)).to(self.bias.dtype)
        if self.training:
            # a backward pass would need the input both scaled and unscaled
            return F.linear(x, scale_columns(self.weight, weights), bias)
        # a step of translation has fewer numbers than the matrix
        return F.linear(scale_columns(x, weights), self.weight, bias)


def scale_columns(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``x`` (…, M·c) with the i-th c columns times weight i, in its own precision."""
    by_branch = x.view(*x.shape[:-1], len(weights), x.size(-1) // len(weights))
    return (by_branch * weights[:, None]).flatten(-2).to(x.dtype)
