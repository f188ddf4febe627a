"""What our optimizers share: a step under ``--amp``, options of Adam, rules for some parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

if TYPE_CHECKING:
    # layers have update rules, and need no fairseq
    from fairseq.optim.adam import FairseqAdamConfig


class AmpScaledStep:
    """Makes the step of a fairseq optimizer, the next base class, work under ``--amp``.

    fairseq's AMPOptimizer unscales the gradients to take their norm. torch's scaler is then handed
    this object, not the optimizer within, and would unscale them a second time: gradients would
    never be long enough to clip.
    """

    # tells the scaler to leave gradients as they are, and to call step() if some are not finite too
    _step_supports_amp_scaling = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the parameters, unless under ``--amp`` a gradient is not finite."""
        # a tensor that the scaler sets; reading it waits for the device, as the scaler would
        if not getattr(self, "found_inf", False):
            super().step(*args, **kwargs)


def adam_options(cfg: FairseqAdamConfig) -> dict[str, Any]:
    """Return lr, betas, eps and weight_decay as an optimizer of torch takes them.

    Args:
        cfg: options of fairseq's ``adam``; the betas may be a text such as "(0.9, 0.98)".
    """
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
    """Base class of rules by which an optimizer updates some of the parameters.

    A module gives its parameters a rule, and the optimizer that knows this kind of rule reads it.
    """


Rule = TypeVar("Rule", bound=UpdateRule)


def set_update_rule(parameter: nn.Parameter, rule: UpdateRule) -> None:
    """Give ``parameter`` a rule, which fairseq's copies in single precision have too."""
    # the one attribute that fairseq's FP16Optimizer hands on to its copies
    parameter.param_group = rule


def update_rule(parameter: nn.Parameter, kind: type[Rule]) -> Rule | None:
    """Return the rule of ``parameter``; None if it has none, or one of another kind."""
    rule = getattr(parameter, "param_group", None)
    return rule if isinstance(rule, kind) else None
