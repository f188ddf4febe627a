"""What our optimizers share: a step under ``--amp``, options of Adam, rules of some parameters."""

from typing import Any, TypeVar

from fairseq.optim import FairseqOptimizer
from torch import nn


class AmpScaledStep(FairseqOptimizer):
    """fairseq's interface to an optimizer, with a step that works under ``--amp``.

    fairseq's AMPOptimizer unscales the gradients to take their norm. torch's scaler is then handed
    this object, not the optimizer within, and would unscale them a second time: gradients would
    never be long enough to clip.
    """

    # tells the scaler to leave the gradients, and what to do if they are not finite, to step()
    _step_supports_amp_scaling = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the parameters, unless under ``--amp`` a gradient is not finite."""
        # the scaler sets found_inf, a tensor, while it steps; it would wait for the device itself
        if not getattr(self, "found_inf", False):
            super().step(*args, **kwargs)


def adam_options(cfg: Any) -> dict[str, Any]:
    """Return lr, betas, eps and weight_decay of options that fairseq's ``adam`` has too."""
    betas = cfg.adam_betas
    if isinstance(betas, str):
        betas = (float(beta) for beta in betas.strip("()[] ").split(","))
    return {
        "lr": cfg.lr[0],
        "betas": tuple(betas),
        "eps": cfg.adam_eps,
        "weight_decay": cfg.weight_decay,
    }


class UpdateRule:
    """Base class of what an optimizer needs to know about some parameters, set by their module."""


Rule = TypeVar("Rule", bound=UpdateRule)


def set_update_rule(parameter: nn.Parameter, rule: UpdateRule) -> None:
    """Tell the optimizer of ``parameter`` about ``rule``."""
    # the one attribute that fairseq hands on to the fp32 copies of half-precision parameters
    parameter.param_group = rule


def update_rule(parameter: nn.Parameter, kind: type[Rule]) -> Rule | None:
    """Return the rule of ``parameter``, or of what it is a copy of; None if that is no ``kind``."""
    rule = getattr(parameter, "param_group", None)
    return rule if isinstance(rule, kind) else None
