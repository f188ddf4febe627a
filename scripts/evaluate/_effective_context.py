"""Compute losses for each context, and the effective context of recl.py.

``l_i(c, t)`` is the loss in nats of model i at position t with a context of c tokens. Shapes: N
positions.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fairseq_plugins.python_interface.language_model import LanguageModel
from scripts.evaluate._scoring import score


def context_losses(
    model: LanguageModel, context: int, arguments: argparse.Namespace, **options: Any
) -> np.ndarray:
    """Return the losses of a split in nats, (N,), in windows that predict --stride tokens.

    With a stride above 1, the size of a batch decides where windows begin.
    """
    # a window's first token has one token before it even without extended context
    windows = {"tokens_per_sample": arguments.stride, "extended_context": context - 1}
    return score(model, arguments, **windows, **options)


def longest_context(model: LanguageModel, stride: int) -> float:
    """Return how many tokens of context absolute positions allow; infinite for other positions."""
    if not model.has_past:
        positions = model.model.max_positions()
    elif model.model.decoder.network.absolute_positions is not None:
        # those of training
        positions = model.segment + model.context
    else:
        return math.inf
    if positions < stride:
        raise ValueError(
            f"--stride is {stride}, and a model was trained on segments of {positions} tokens: "
            "give a stride of at most that"
        )
    return positions - stride + 1


def relative_gain(short: Sequence[np.ndarray], long: np.ndarray, ratio: float) -> float:
    """Return ``g_i(c, c')`` from l_i(c, ·) of each model of the group and l_i(c', ·), each (N,)."""
    baseline = np.min(np.stack(short), axis=0)
    number = math.ceil(ratio * len(baseline))
    hardest = np.sort(np.argsort(-baseline, kind="stable")[:number])
    # f_i(c, c) and f_i(c, c')
    base, reached = (
        float(np.minimum(baseline, other)[hardest].mean(dtype=np.float64))
        for other in (baseline, long)
    )
    # computed from the difference of losses, because perplexities of large losses would overflow
    return -math.expm1(reached - base)


def effective_context(
    losses: Callable[[int, int], np.ndarray],
    limits: Sequence[float],
    model: int,
    contexts: range,
    ratio: float,
    threshold: float,
) -> dict[str, Any]:
    """Return the RECL of a model in a group: "tokens", their "bound" and the "gains" of all steps.

    Args:
        losses: function that returns l_i(c, ·), (N,), for model i and context c.
        limits: the most tokens that each model of the group can read.
        model: i.
        contexts: c, from the shortest to the longest.
        ratio: r.
        threshold: the smallest gain, as a share of the perplexity, for which to go on.
    """
    gains: list[dict[str, Any]] = []
    tokens, bound = contexts[0], "at least"
    for long in contexts[1:]:
        group = [losses(other, tokens) for other in range(len(limits))]
        gain = relative_gain(group, losses(model, long), ratio)
        gains.append({"short": tokens, "long": long, "gain": gain})
        if gain < threshold:
            bound = "exact" if len(gains) > 1 else "at most"
            break
        tokens = long
    if tokens > limits[model]:
        # the model reads nothing beyond its limit, so a longer context cannot help
        tokens, bound = int(limits[model]), "at most" if bound == "at most" else "exact"
    return {"tokens": tokens, "bound": bound, "gains": gains}
