"""Relative effective context length on arrays of losses, as recl.py defines and reads it.

``l_i(c, t)`` is the loss in nats of model i at position t with a context of c tokens. Shapes: N
positions.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from scripts._shared.command_line import check_at_least


class Contexts(NamedTuple):
    """Contexts to go through, in tokens: ``first``, then ``step`` more each, up to ``longest``."""

    first: int
    step: int
    longest: int


class Gain(NamedTuple):
    """What a model gains from ``long`` tokens of context over the group's ``short`` ones."""

    short: int
    long: int
    gain: float


class EffectiveContext(NamedTuple):
    """RECL in tokens, "exact" or which bound it is, and the gains on the way."""

    tokens: int
    bound: str
    gains: list[Gain]


def check_contexts(contexts: Contexts) -> None:
    """Raise ValueError for contexts that cannot be gone through."""
    check_at_least(1, first_context=contexts.first, step=contexts.step)
    if contexts.longest < contexts.first + contexts.step:
        raise ValueError(
            f"--max-context is {contexts.longest}: it must be at least --first-context plus "
            f"--step, {contexts.first + contexts.step}"
        )


def relative_gain(short: Sequence[np.ndarray], long: np.ndarray, ratio: float) -> float:
    """``g_i(c, c')``, from 0 to 1.

    Args:
        short: l_i(c, ·) of each model of the group, each (N,).
        long: l_i(c', ·) of one model, (N,).
        ratio: r.
    """
    baseline = np.min(np.stack(short), axis=0)
    if not (np.isfinite(baseline).all() and np.isfinite(long).all()):
        raise ValueError("a loss is not finite: look for NaN in the checkpoints")
    number = math.ceil(ratio * len(baseline))
    hardest = np.sort(np.argsort(-baseline, kind="stable")[:number])
    # f_i(c, c) and f_i(c, c')
    base, reached = (
        float(np.minimum(baseline, other)[hardest].mean(dtype=np.float64))
        for other in (baseline, long)
    )
    # the difference of losses, because perplexities of hopeless positions would overflow
    return -math.expm1(reached - base)


def effective_context(
    losses: Callable[[int, int], np.ndarray],
    num_models: int,
    model: int,
    contexts: Contexts,
    ratio: float,
    threshold: float,
    limit: int | None = None,
) -> EffectiveContext:
    """RECL of one model of a group.

    Args:
        losses: gives l_i(c, ·), (N,), for model i and context c.
        num_models: size of the group.
        model: i.
        contexts: the contexts to go through.
        ratio: r.
        threshold: the gain, as a share of the perplexity, below which it ends.
        limit: as many tokens as the model can read; None for no limit.
    """
    gains: list[Gain] = []
    short, bound = contexts.first, "at least"
    while short + contexts.step <= contexts.longest:
        long = short + contexts.step
        group = [losses(other, short) for other in range(num_models)]
        gains.append(Gain(short, long, relative_gain(group, losses(model, long), ratio)))
        if gains[-1].gain < threshold:
            bound = "exact" if short > contexts.first else "at most"
            break
        short = long
    if limit is not None and short > limit:
        # there is nothing beyond it to have missed
        return EffectiveContext(limit, "exact" if bound == "at least" else bound, gains)
    return EffectiveContext(short, bound, gains)
