"""Adagrad with shorter steps for parameters with long gradients, as all-attention trains.

Sukhbaatar et al. 2019 (arXiv:1907.01470), section 5.1, clips "individual gradients with a norm
larger than 0.03". The published code accumulates squares of the unclipped gradient and clips only
the step, and its learning rate of 0.07 belongs to this rule::

    sum += g²
    p   -= lr · min(1, clip / ‖g‖) · g / √sum
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor, nn

from fairseq_plugins.fairseq_integration.options import option
from fairseq_plugins.fairseq_integration.parameters import OwnRulesStep

EPSILON = 1e-10


class AdagradWithClip(torch.optim.Optimizer):
    """Adagrad whose steps shrink by ``clip`` / ‖g‖ if that is below 1, for each tensor separately.

    g includes the weight decay. ``clip`` 0 means no clip.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, clip: float = 0.03, weight_decay: float = 0.0
    ) -> None:
        for argument, value in {"lr": lr, "clip": clip, "weight_decay": weight_decay}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"`{argument}` is {value}: it must be 0 or more, and finite")
        super().__init__(params, {"lr": lr, "clip": clip, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update the parameters that have a gradient; return the loss of ``closure``, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(params, group["lr"], group["clip"], group["weight_decay"])
        return loss

    def _update(
        self, params: list[nn.Parameter], lr: float, clip: float, weight_decay: float
    ) -> None:
        grads = [p.grad for p in params]
        sums = [self._sum(p) for p in params]
        if weight_decay > 0:
            grads = torch._foreach_add(grads, params, alpha=weight_decay)
        torch._foreach_addcmul_(sums, grads, grads)
        steps = torch._foreach_sqrt(sums)
        torch._foreach_add_(steps, EPSILON)
        # in place, so that a step needs only one copy of the weights
        torch._foreach_reciprocal_(steps)
        torch._foreach_mul_(steps, grads)
        if clip > 0:
            # norms and factors stay on the device, as reading them would make the host wait
            factors = torch._foreach_norm(grads)
            torch._foreach_add_(factors, EPSILON)
            torch._foreach_reciprocal_(factors)
            torch._foreach_mul_(factors, clip)
            torch._foreach_clamp_max_(factors, 1.0)
            torch._foreach_mul_(steps, factors)
        torch._foreach_add_(params, steps, alpha=-lr)

    def _sum(self, parameter: nn.Parameter) -> Tensor:
        if parameter.grad.is_sparse:
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, which "
                "AdagradWithClip cannot use: take dense embeddings (sparse=False), or Adagrad"
            )
        state = self.state[parameter]
        if "sum" not in state:
            state["sum"] = torch.zeros_like(parameter)
        return state["sum"]


@dataclass
class AdagradWithClipConfig(FairseqDataclass):
    """Options of ``--optimizer adagrad_with_clip``."""

    adagrad_clip: float = option(
        0.03, "largest norm of a parameter's gradient before its step is shortened; 0 for no limit"
    )
    weight_decay: float = option(0.0, "fraction of each parameter to add to its gradient")
    lr: list[float] = II("optimization.lr")


@register_optimizer("adagrad_with_clip", dataclass=AdagradWithClipConfig)
class FairseqAdagradWithClip(OwnRulesStep, FairseqOptimizer):
    """:class:`AdagradWithClip` as fairseq's ``--optimizer adagrad_with_clip``."""

    def __init__(self, cfg: AdagradWithClipConfig, params: Iterable[nn.Parameter]) -> None:
        super().__init__(cfg)
        self._optimizer = AdagradWithClip(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict[str, float]:
        """Return the arguments of :class:`AdagradWithClip`."""
        return {
            "lr": self.cfg.lr[0],
            "clip": self.cfg.adagrad_clip,
            "weight_decay": self.cfg.weight_decay,
        }

    def load_state_dict(
        self, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None
    ) -> None:
        """Load a checkpoint's sums and learning rate, but not its clip and decay.

        ``optimizer_overrides`` (``--optimizer-overrides``) win over both.
        """
        current = {name: self.optimizer_config[name] for name in ("clip", "weight_decay")}
        super().load_state_dict(state_dict, {**current, **(optimizer_overrides or {})})
        for parameter, state in self._optimizer.state.items():
            if state["sum"].shape != parameter.shape:
                raise ValueError(
                    "the checkpoint's optimizer state has a tensor of shape "
                    f"{tuple(state['sum'].shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}, as after another --attention-span: give "
                    "--reset-optimizer, or --finetune-from-model"
                )
