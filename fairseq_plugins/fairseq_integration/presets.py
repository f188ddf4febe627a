"""Named architectures: the values that ``--arch NAME`` sets where the command line is silent."""

from __future__ import annotations

import dataclasses
import importlib.util
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    register_model_architecture,
)
from omegaconf import DictConfig, OmegaConf


def register_presets(model: str, presets: dict[str, dict[str, Any]]) -> None:
    """Register named architectures of a model.

    The model's own name becomes a preset without values, so that ``--arch`` treats it like others.

    Args:
        model: the name that the model is registered by.
        presets: values of the model's options, by the name of the preset.
    """
    if model in ARCH_MODEL_REGISTRY:
        ARCH_CONFIG_REGISTRY[model] = _preset(model, {})
    else:
        # fairseq registers the name of a model only where that has a dataclass
        register_model_architecture(model, model)(_preset(model, {}))
    for name, values in presets.items():
        register_model_architecture(model, name)(_preset(model, values))


def _preset(model: str, values: dict[str, Any]) -> Callable[[Any], None]:
    """Return what fairseq calls with the options of ``--arch`` NAME, to complete them in place."""

    def complete(cfg: Any) -> None:
        if OmegaConf.is_config(cfg):
            # of a saved model, which has the preset's values
            _add_options_newer_than_checkpoint(cfg, MODEL_DATACLASS_REGISTRY[model])
            return
        for option, value in values.items():
            if not hasattr(cfg, option):
                setattr(cfg, option, value)
        if isinstance(cfg, Namespace):
            _keep_bf16_off_tpus(cfg)

    return complete


def _add_options_newer_than_checkpoint(cfg: DictConfig, options: type) -> None:
    """Give options that a checkpoint lacks their defaults, with which it was trained.

    fairseq does so for a model's own name, but not for the name of a preset.
    """
    for option in dataclasses.fields(options):
        if option.name not in cfg:
            cfg[option.name] = option.default


def keep_bf16_off_tpus() -> None:
    """Let ``--bf16`` train all registered models on a CPU or GPU where ``torch_xla`` is missing."""
    for name, complete in ARCH_CONFIG_REGISTRY.items():
        ARCH_CONFIG_REGISTRY[name] = partial(_complete_without_tpu, complete)


def _complete_without_tpu(complete: Callable[[Any], None], cfg: Any) -> None:
    complete(cfg)
    if isinstance(cfg, Namespace):
        _keep_bf16_off_tpus(cfg)


def _keep_bf16_off_tpus(args: Namespace) -> None:
    """Set ``--tpu`` to false where ``torch_xla`` is missing.

    fairseq's command line takes ``--bf16`` to mean a TPU, but GPUs and CPUs have bfloat16 too.
    """
    if getattr(args, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        args.tpu = False
