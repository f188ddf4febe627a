"""Adagrad with shorter steps for parameters with long gradients, as all-attention trains.

Sukhbaatar et al. 2019 (arXiv:1907.01470), section 5.1, clips "individual gradients with a norm
larger than 0.03". The published code accumulates squares of the unclipped gradient and clips only
the step, and its learning rate of 0.07 belongs to this rule::

    sum += g²
    p   -= lr · min(1, clip / ‖g‖) · g / √sum
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_plugins.sizes import check_sizes

EPSILON = 1e-10


class AdagradWithClip(torch.optim.Optimizer):
    """Adagrad whose steps shrink by ``clip`` / ‖g‖ if that is below 1, for each tensor separately.

    g includes the weight decay. ``clip`` 0 means no clip.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, clip: float = 0.03, weight_decay: float = 0.0
    ) -> None:
        check_sizes(0, lr=lr, clip=clip, weight_decay=weight_decay)
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
