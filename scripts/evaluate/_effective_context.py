"""Compute losses for each context, and the effective context of recl.py.

``l_i(c, t)`` is the loss in nats of model i at position t with a context of c tokens. Shapes: N
positions.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from scripts._shared.checkpoints import checkpoint_options, load_checkpoint
from scripts._shared.command_line import NamedFile
from scripts.evaluate._scoring import load_model


class ContextLosses:
    """Losses of models that read the first ``positions`` tokens of a split in windows.

    ``options`` are the command's: data, split, stride, batch_size and cpu. With a stride above 1
    the batch size decides where windows begin. ``limits`` are the models' longest contexts in
    tokens, or None if any length works.
    """

    def __init__(
        self, checkpoints: list[NamedFile], positions: int, options: argparse.Namespace
    ) -> None:
        self.checkpoints = checkpoints
        self.positions = positions
        self.options = options
        self.limits = [context_limit(model, options.stride) for model in checkpoints]
        self._models = [load_model(checkpoint, options) for checkpoint in checkpoints]
        self._losses: dict[tuple[int, int], np.ndarray] = {}

    def __call__(self, number: int, context: int) -> np.ndarray:
        """Return the losses of a model in nats, float32 (positions,), measured once.

        The context is cut to what the model can read.
        """
        context = min(context, self.limits[number] or context)
        if (number, context) not in self._losses:
            self._losses[number, context] = self._models[number].score_split(
                self.options.split,
                batch_size=self.options.batch_size,
                tokens_per_sample=self.options.stride,
                # a segment's first token has one token before it even without extended context
                extended_context=context - 1,
                max_tokens=self.positions,
                description=f"{self.checkpoints[number].label}, context {context}",
            )
        return self._losses[number, context]


def context_limit(checkpoint: NamedFile, stride: int) -> int | None:
    """Return how many tokens of context absolute positions allow; None for other positions."""
    options = checkpoint_options(load_checkpoint(checkpoint.path), "model")
    if not str(options.get("positions")).endswith("-absolute"):
        return None
    max_positions = options["tokens_per_sample"] + options["extended_context"]
    if max_positions < stride:
        raise ValueError(
            f"--stride is {stride}: {checkpoint.label} was trained on segments of {max_positions} "
            "tokens; give a stride of at most that"
        )
    return max_positions - stride + 1


def relative_gain(short: Sequence[np.ndarray], long: np.ndarray, ratio: float) -> float:
    """Return ``g_i(c, c')``, from 0 to 1.

    Args:
        short: l_i(c, ·) of each model of the group, each (N,).
        long: l_i(c', ·) of one model, (N,).
        ratio: r.
    """
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
    num_models: int,
    model: int,
    step: int,
    longest: int,
    ratio: float,
    threshold: float,
    limit: int | None = None,
) -> dict[str, Any]:
    """Return the RECL of a model in a group: "tokens", their "bound" and the "gains" of all steps.

    Args:
        losses: function that returns l_i(c, ·), (N,), for model i and context c.
        num_models: size of the group.
        model: i.
        step: the shortest context, and the difference between successive contexts.
        longest: the longest context.
        ratio: r.
        threshold: the smallest gain, as a share of the perplexity, for which to go on.
        limit: the most tokens that the model can read; None for no limit.
    """
    gains = []
    short, bound = step, "at least"
    while (long := short + step) <= longest:
        group = [losses(other, short) for other in range(num_models)]
        gain = relative_gain(group, losses(model, long), ratio)
        gains.append({"short": short, "long": long, "gain": gain})
        if gain < threshold:
            bound = "exact" if short > step else "at most"
            break
        short = long
    if limit is not None and short > limit:
        # the model reads nothing beyond its limit, so a longer context cannot help
        short, bound = limit, "exact" if bound == "at least" else bound
    return {"tokens": short, "bound": bound, "gains": gains}
