"""An optimizer whose gradients ``--amp`` unscales once, not twice."""

from typing import Any

from fairseq.optim import FairseqOptimizer


class AmpScaledStep(FairseqOptimizer):
    """fairseq's interface to an optimizer, with a step that works under ``--amp``.

    fairseq's AMPOptimizer unscales the gradients to take their norm, and torch's scaler, which is
    then handed this object and not the optimizer within, would unscale them again: they would
    never be long enough to clip.
    """

    # tells the scaler to leave the gradients, and what to do if they are not finite, to step()
    _step_supports_amp_scaling = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the parameters, unless under ``--amp`` a gradient is not finite."""
        # the scaler sets found_inf, a tensor, while it steps; it would wait for the device itself
        if not getattr(self, "found_inf", False):
            super().step(*args, **kwargs)
