"""Adam for the Weighted Transformer: κ and α have their own schedule and stay on the simplex.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), sections 3 and 4.1. fairseq's optimizers know one
learning rate; this one sets that of κ and α by itself, at each update, and projects them right
after it, wherever the weights are that it updates: the model's or copies of them in single
precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fairseq.optim import register_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.optimizers import AmpScaledStep, adam_options
from fairseq_plugins.weighted_transformer.branch_weights import BranchSchedule, project_to_simplex

logger = logging.getLogger(__name__)


class AdamWithBranchWeights(Adam):
    """fairseq's Adam, with parameters that follow a schedule of their own.

    Args:
        params: all parameters. The attribute ``param_group`` of κ and α is their schedule.
        options: of fairseq's Adam.
    """

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        scheduled: dict[int, tuple[BranchSchedule, list[nn.Parameter]]] = {}
        others = []
        for param in params:
            schedule = getattr(param, "param_group", None)
            if isinstance(schedule, BranchSchedule):
                scheduled.setdefault(id(schedule), (schedule, []))[1].append(param)
            else:
                others.append(param)
        super().__init__(others, **options)
        self.schedules = [schedule for schedule, _ in scheduled.values()]
        for schedule, weights in scheduled.values():
            schedule.taken = True
            self.add_param_group({"params": weights, "weight_decay": 0.0, "updates": 0})

    @property
    def supports_flat_params(self) -> bool:
        """Return False: a flat copy of the parameters would not say which are κ and α."""
        return False

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update the parameters, and project κ and α.

        Args:
            closure: computes the loss and the gradients, if they are not there yet.

        Returns:
            The closure's loss.
        """
        loss = None if closure is None else closure()
        groups = list(zip(self.schedules, self.param_groups[1:], strict=True))
        for schedule, group in groups:
            group["updates"] += 1
            if schedule.frozen(group["updates"]):
                # Adam passes over what has no gradient
                for weight in group["params"]:
                    weight.grad = None
            else:
                group["lr"] = schedule.learning_rate(group["updates"])
        super().step()
        for schedule, group in groups:
            if schedule.projected and not schedule.frozen(group["updates"]):
                for weight in group["params"]:
                    project_to_simplex(weight)
        return loss


@dataclass
class AdamWithBranchWeightsConfig(FairseqAdamConfig):
    """Options of ``--optimizer adam_with_branch_weights``: those of ``adam``."""


@register_optimizer("adam_with_branch_weights", dataclass=AdamWithBranchWeightsConfig)
class FairseqAdamWithBranchWeights(AmpScaledStep):
    """:class:`AdamWithBranchWeights` as fairseq's ``--optimizer adam_with_branch_weights``.

    Args:
        cfg: the options.
        params: the model's parameters, or fairseq's copies of them in single precision.

    Raises:
        ValueError: an option of ``adam`` does not go with branch weights.
    """

    def __init__(self, cfg: AdamWithBranchWeightsConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        if cfg.fp16_adam_stats:
            raise ValueError(
                "--fp16-adam-stats with --optimizer adam_with_branch_weights: leave it out"
            )
        self._optimizer = AdamWithBranchWeights(list(params), **self.optimizer_config)
        count = len(self._optimizer.schedules)
        if count:
            logger.info("kappa and alpha of %d branched attentions have their own schedule", count)
        else:
            logger.info("no parameter is a branch weight: this is fairseq's Adam")

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the arguments of :class:`AdamWithBranchWeights`."""
        return adam_options(self.cfg)
