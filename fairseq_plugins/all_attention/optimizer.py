"""``--optimizer adagrad_with_clip``: :class:`.AdagradWithClip` in fairseq."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import nn

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClip
from fairseq_plugins.fairseq_integration.options import option
from fairseq_plugins.fairseq_integration.parameters import OwnRulesStep


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
