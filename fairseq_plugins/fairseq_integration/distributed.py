"""Refuses devices that a machine lacks, and distributed trainings that this package cannot do.

fairseq would fail in the middle of a training, or compute something else.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from omegaconf import DictConfig, OmegaConf
from torch import nn

from fairseq_plugins.fairseq_integration.error_messages import flag
from fairseq_plugins.fairseq_integration.parameters import UpdateRule, update_rule

# option, allowed values, reason and remedy
_NEVER: list[tuple[str, tuple[Any, ...], str]] = [
    (
        "ddp_backend",
        ("pytorch_ddp", "legacy_ddp", "c10d", "no_c10d"),
        "it is not supported: give --ddp-backend legacy_ddp or pytorch_ddp",
    ),
    ("model_parallel_size", (1,), "layers cannot be split over GPUs: leave it out"),
    ("pipeline_model_parallel", (False,), "layers cannot be split over GPUs: leave it out"),
]
# these would break or ignore the update rules and constraints of parameters
_WITH_RULES = [("use_bmuf", (False,), "leave it out"), ("zero_sharding", ("none",), "leave it out")]


def check_training(cfg: Any, model: nn.Module) -> None:
    """Refuse to distribute a training in a way that its model does not support.

    ``cfg`` is the model's part of fairseq's configuration, or all parsed options.
    """
    wanted = _collect_options(cfg)
    for option, valid, remedy in _NEVER:
        if wanted.get(option, valid[0]) not in valid:
            raise ValueError(f"{flag(option)} is {wanted[option]}: {remedy}")
    for option, valid, remedy in _WITH_RULES:
        if wanted.get(option, valid[0]) not in valid and (name := _find_module_with_rules(model)):
            raise ValueError(
                f"{flag(option)} is {wanted[option]}: parameters of {name} have an update rule or "
                f"a constraint, which this option ignores; {remedy}"
            )


def _collect_options(cfg: Any) -> dict[str, Any]:
    """Return the options to check, from all groups of the configuration."""
    if not OmegaConf.is_config(cfg):
        return vars(cfg)
    found: dict[str, Any] = {}
    for group in cfg._get_root().values():
        if isinstance(group, DictConfig):
            names = [option for option, _, _ in (*_NEVER, *_WITH_RULES) if option in group]
            # the first group that has an option passes it on to others
            found = {**{name: group[name] for name in names}, **found}
    return found


def _find_module_with_rules(model: nn.Module) -> str:
    """Return the class of a module with a rule or constraint; "" if there is no such module."""
    for module in model.modules():
        ruled = any(update_rule(own, UpdateRule) for own in module.parameters(recurse=False))
        if ruled or hasattr(type(module), "constrained"):
            return type(module).__name__
    return ""


def check_devices() -> None:
    """Let fairseq's commands refuse options that need a GPU if there is none."""
    theirs = distributed_utils.call_main
    distributed_utils.call_main = functools.wraps(theirs)(functools.partial(_call_main, theirs))


def _call_main(call: Callable[..., Any], cfg: Any, main: Callable[..., Any], **kwargs: Any) -> Any:
    if cfg.common.cpu:
        # if fairseq sees a GPU, it puts the norm of the gradients there, and cannot clip by it
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gpus = 0 if cfg.common.cpu else torch.cuda.device_count()
    no_gpu_because = "--cpu is given" if cfg.common.cpu else "there is none"
    trains, workers = cfg.common_eval.path is None, cfg.distributed_training
    on_cpu = cfg.common.fp16_no_flatten_grads or cfg.common.memory_efficient_fp16
    if trains and cfg.common.fp16 and not (gpus or cfg.common.tpu or on_cpu):
        raise ValueError(
            f"--fp16 needs a GPU, and {no_gpu_because}: add --fp16-no-flatten-grads, or give --bf16"
        )
    size, spawns = workers.distributed_world_size, not workers.distributed_no_spawn
    if size > 1 and spawns and not (gpus or cfg.common.tpu):
        raise ValueError(
            f"--distributed-world-size is {size}, which needs {size} GPUs, and {no_gpu_because}: "
            "give --distributed-world-size 1, or start each worker separately with "
            "--distributed-no-spawn (docs/training.md)"
        )
    return call(cfg, main, **kwargs)
