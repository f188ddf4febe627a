"""Adam for the Weighted Transformer: κ and α have their own schedule and stay on the simplex.

Ahmed, Keskar, Socher 2017 (arXiv:1711.02132), sections 3 and 4.1. fairseq schedules one learning
rate; this optimizer sets the rate of κ and α itself. After each update it projects the tensors that
it updates, which are the model's or fairseq's copies in single precision. These copies keep the
attribute ``optim_overrides``, which is fairseq's for the options of a single parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fairseq.optim import FairseqOptimizer, register_optimizer
from fairseq.optim.adam import Adam, FairseqAdamConfig
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.parameters import OwnRulesStep, adam_options
from fairseq_plugins.weighted_transformer.branch_weights import (
    LEARNED,
    SIMPLEX,
    BranchWeights,
    learning_rate,
    project_to_simplex,
)
from fairseq_plugins.weighted_transformer.options import OPTIMIZER, BranchOptions


@dataclass(eq=False)
class BranchSchedule:
    """How κ and α of one layer are trained (section 4.1); ``depth`` is d_model/N for N layers."""

    options: BranchOptions
    depth: float

    def learning_rate(self, update: int) -> float | None:
        """Return the learning rate of an update, from 1; None if κ and α stay as they are."""
        last = self.options.freeze_branch_weights_after
        if last is not None and update > last:
            return None
        factor, warmup = self.options.branch_lr, self.options.branch_warmup_updates
        return learning_rate(update, self.depth, factor, warmup)


def schedule_branches(layers: nn.ModuleList, embed_dim: int, options: BranchOptions) -> None:
    """Let :class:`AdamWithBranchWeights` train κ and α of encoder or decoder by their options."""
    # iterating over the list itself may drop layers (--encoder-layerdrop)
    for layer in layers.children():
        overrides = {"branch_schedule": BranchSchedule(options, embed_dim / len(layers))}
        for weights in layer.modules():
            if isinstance(weights, BranchWeights):
                getattr(weights, weights.name).optim_overrides = {"optimizer": overrides}


class AdamWithBranchWeights(Adam):
    """fairseq's Adam; parameters with a :class:`BranchSchedule` follow it and are projected."""

    def __init__(self, params: Iterable[nn.Parameter], **options: Any) -> None:
        scheduled: dict[Any, list[nn.Parameter]] = {}
        for param in params:
            overrides = getattr(param, "optim_overrides", {}).get("optimizer", {})
            scheduled.setdefault(overrides.get("branch_schedule"), []).append(param)
        super().__init__(scheduled.pop(None, []), **options)
        self.schedules: list[BranchSchedule] = list(scheduled)
        for schedule, weights in scheduled.items():
            replaced = schedule.options.branch_weights
            if replaced != LEARNED:
                raise ValueError(
                    f"--branch-weights is {replaced} in training: leave it out, and give it where "
                    "the model is evaluated, --model-overrides \"{'branch_weights': ...}\""
                )
            self.add_param_group({"params": weights, "weight_decay": 0.0, "updates": 0})

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update the parameters and project κ and α; return what ``closure`` returns."""
        loss = None if closure is None else closure()
        projected = []
        for schedule, group in zip(self.schedules, self.param_groups[1:], strict=True):
            group["updates"] += 1
            rate = schedule.learning_rate(group["updates"])
            if rate is None:
                # Adam skips parameters without a gradient
                for weight in group["params"]:
                    weight.grad = None
                continue
            group["lr"] = rate
            if schedule.options.branch_parameterization == SIMPLEX:
                projected += group["params"]
        super().step()
        for weight in projected:
            project_to_simplex(weight)
        return loss


@register_optimizer(OPTIMIZER, dataclass=FairseqAdamConfig)
class FairseqAdamWithBranchWeights(OwnRulesStep, FairseqOptimizer):
    """:class:`AdamWithBranchWeights` as fairseq's ``--optimizer adam_with_branch_weights``."""

    def __init__(self, cfg: FairseqAdamConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        self._optimizer = AdamWithBranchWeights(list(params), **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, Any]:
        """Return the arguments of :class:`AdamWithBranchWeights`."""
        return adam_options(self.cfg)
