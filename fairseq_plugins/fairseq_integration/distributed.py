"""Ways to share out a training that models of this package do not go with: refused, by name.

fairseq would find out in the middle of a training, or not at all.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from fairseq_plugins.fairseq_integration.optimizers import UpdateRule, update_rule

# option, the values that are fine, and what to do; a model may have layers that a part of it lacks
_NEVER = [
    (
        "ddp_backend",
        ("pytorch_ddp", "legacy_ddp", "c10d", "no_c10d"),
        "it is not supported: give --ddp-backend legacy_ddp or pytorch_ddp",
    ),
    ("model_parallel_size", (1,), "layers cannot be split over GPUs: leave it out"),
    ("pipeline_model_parallel", (False,), "layers cannot be split over GPUs: leave it out"),
]
# with parameters that have an update rule or a constraint, which these would break or pass by
_WITH_RULES = [
    ("use_bmuf", (False,), "leave it out"),
    ("zero_sharding", ("none",), "leave it out"),
]


def check_training(cfg: Any, model: nn.Module) -> None:
    """Check that a model goes with how its training is shared out.

    Args:
        cfg: the model's options, in fairseq's configuration, or parsed with all others.
        model: the model.

    Raises:
        ValueError: it does not.
    """
    wanted = _options(cfg)
    for option, fine, remedy in _NEVER:
        if wanted.get(option, fine[0]) not in fine:
            raise ValueError(f"{_flag(option)} is {wanted[option]}: {remedy}")
    for option, fine, remedy in _WITH_RULES:
        if wanted.get(option, fine[0]) not in fine and (name := _module_with_rules(model)):
            raise ValueError(
                f"{_flag(option)} is {wanted[option]}: parameters of {name} have an update or a "
                f"constraint of their own, which it does not know; {remedy}"
            )


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _options(cfg: Any) -> dict[str, Any]:
    """Return all options of a training, of whichever group."""
    if not OmegaConf.is_config(cfg):
        return vars(cfg)
    found = {}
    for group in cfg._get_root().values():
        if isinstance(group, DictConfig):
            names = [option for option, _, _ in (*_NEVER, *_WITH_RULES) if option in group]
            # the first group that has it is where others take it from
            found = {**{name: group[name] for name in names}, **found}
    return found


def _module_with_rules(model: nn.Module) -> str:
    """Return the kind of a module whose parameters have a rule or a constraint; "" for none."""
    for module in model.modules():
        ruled = any(update_rule(own, UpdateRule) for own in module.parameters(recurse=False))
        if ruled or hasattr(type(module), "constrained"):
            return type(module).__name__
    return ""
