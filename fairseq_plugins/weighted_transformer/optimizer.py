"""Adam for the Weighted Transformer: κ and α have their own schedule and stay on the simplex.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), sections 3 and 4.1. fairseq schedules one learning
rate; this optimizer sets the rate of κ and α itself. After each update it projects the tensors that
it updates, which are the model's or fairseq's copies in single precision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.parameters import OwnRulesStep, adam_options, update_rule
from fairseq_plugins.weighted_transformer.branch_weights import BranchSchedule, project_to_simplex

logger = logging.getLogger(__name__)


class AdamWithBranchWeights(Adam):
    """fairseq's Adam; parameters with a :class:`BranchSchedule` follow it and are projected."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        scheduled: dict[BranchSchedule, list[nn.Parameter]] = {}
        others = []
        for param in params:
            schedule = update_rule(param, BranchSchedule)
            if schedule is None:
                others.append(param)
            else:
                scheduled.setdefault(schedule, []).append(param)
        super().__init__(others, **options)
        self.schedules = list(scheduled)
        for schedule, weights in scheduled.items():
            schedule.followed = True
            self.add_param_group({"params": weights, "weight_decay": 0.0, "updates": 0})

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update the parameters and project κ and α; return what ``closure`` returns."""
        loss = None if closure is None else closure()
        groups = list(zip(self.schedules, self.param_groups[1:], strict=True))
        for schedule, group in groups:
            group["updates"] += 1
            if schedule.frozen(group["updates"]):
                # Adam skips parameters without a gradient
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


@register_optimizer("adam_with_branch_weights", dataclass=FairseqAdamConfig)
class FairseqAdamWithBranchWeights(OwnRulesStep, FairseqOptimizer):
    """:class:`AdamWithBranchWeights` as fairseq's ``--optimizer adam_with_branch_weights``."""

    def __init__(self, cfg: FairseqAdamConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        self._optimizer = AdamWithBranchWeights(list(params), **self.optimizer_config)
        count = len(self._optimizer.schedules)
        if count:
            logger.info("kappa and alpha of %d layers have their own schedule", count)
        else:
            logger.info("no parameter is a branch weight: this is fairseq's Adam")

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the arguments of :class:`AdamWithBranchWeights`."""
        return adam_options(self.cfg)
