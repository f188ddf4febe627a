"""Named architectures: the values that ``--arch NAME`` or ``model._name=NAME`` sets.

The command line or a Hydra configuration overrides them. A saved model keeps the values of its
training; options that are newer than the checkpoint get their defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import typing
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import fairseq.dataclass.utils
import fairseq.models
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    register_model_architecture,
)
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError

from fairseq_plugins.fairseq_integration.distributed import check_training
from fairseq_plugins.fairseq_integration.error_messages import flag

# the dataclass of the model's options, by the preset's name
_PRESETS: dict[str, type] = {}


def register_presets(model: str, presets: dict[str, dict[str, Any]]) -> None:
    """Register named architectures of a registered model, with the values of their options."""
    options = MODEL_DATACLASS_REGISTRY[model]
    for name, values in [(model, {}), *presets.items()]:
        _PRESETS[name] = options
        complete = partial(_complete_without_tpu, partial(_complete_parsed, values))
        if name == model:
            # fairseq has registered this name
            ARCH_CONFIG_REGISTRY[name] = complete
        else:
            register_model_architecture(model, name)(complete)
            _register_dataclass(name, options, values)


def _register_dataclass(name: str, base: type, values: dict[str, Any]) -> None:
    """Register a model's options for Hydra, with a preset's values as defaults."""
    fields = {option.name: option for option in dataclasses.fields(base)}
    changed = [
        (option, fields[option].type, dataclasses.field(default=value))
        for option, value in values.items()
    ]
    options = dataclasses.make_dataclass(f"{base.__name__}_{name}", changed, bases=(base,))
    node = options()
    node._name = name
    MODEL_DATACLASS_REGISTRY[name] = options
    ARCH_MODEL_NAME_REGISTRY[name] = name
    ConfigStore.instance().store(name=name, group="model", node=node, provider="fairseq_plugins")


def _complete_parsed(values: dict[str, Any], cfg: Any) -> None:
    """Set a preset's values, except for options that the command line gives."""
    if OmegaConf.is_config(cfg):
        return
    for option, value in values.items():
        if not hasattr(cfg, option):
            setattr(cfg, option, value)


def _list_options(options: type) -> tuple[dataclasses.Field, ...]:
    return tuple(option for option in dataclasses.fields(options) if option.name[0] != "_")


def apply_presets() -> None:
    """Let fairseq apply presets when it builds a model, and name wrong options."""
    for module, name, ours in (
        (fairseq.models, "build_model", _build_model),
        (fairseq.models, "merge_with_parent", _merge),
        # for fairseq-hydra-train
        (fairseq.dataclass.utils, "merge_with_parent", _merge),
    ):
        theirs = getattr(module, name)
        setattr(module, name, functools.wraps(theirs)(partial(ours, theirs)))


def _build_model(
    build: Callable[..., Any], cfg: Any, task: Any, from_checkpoint: bool = False
) -> Any:
    """Complete the options of a model, then build it with fairseq's function."""
    name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
    if name not in _PRESETS:
        return build(cfg, task, from_checkpoint)
    options = _PRESETS[name]
    if from_checkpoint:
        _add_newer_options(cfg, options)
    elif not OmegaConf.is_config(cfg):
        ARCH_CONFIG_REGISTRY[name](cfg)
    _check_numbers(cfg, options)
    model = build(cfg, task, from_checkpoint)
    if not from_checkpoint:
        check_training(cfg, model)
    return model


def _add_newer_options(cfg: Any, options: type) -> None:
    """Set options that are newer than a checkpoint to their defaults."""
    for option in _list_options(options):
        # only configurations have interpolations: models complete parsed options by themselves
        unresolvable = str(option.default).startswith("${") and not OmegaConf.is_config(cfg)
        if not hasattr(cfg, option.name) and not unresolvable:
            with open_dict(cfg) if OmegaConf.is_config(cfg) else nullcontext():
                setattr(cfg, option.name, option.default)


def _check_numbers(cfg: Any, options: type) -> None:
    """Refuse the wrong kind of number, which ``--model-overrides`` may give."""
    kinds = typing.get_type_hints(options)
    for option in _list_options(options):
        allowed = {kinds[option.name], *typing.get_args(kinds[option.name])} & {int, float}
        value = getattr(cfg, option.name, None)
        if not allowed or value is None:
            continue
        wanted = "a finite number" if float in allowed else "a whole number"
        # configurations do not accept 1e3 as a whole number
        number = isinstance(value, int if float not in allowed else (int, float))
        if not number or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(
                f"{flag(option.name)} is {value!r}: it must be {wanted} (with a "
                f"trained model: --model-overrides \"{{'{option.name}': ...}}\")"
            )


def _merge(
    merge: Callable[..., DictConfig], options: Any, cfg: DictConfig, remove_missing: bool = False
) -> DictConfig:
    """Merge a configuration into its dataclass with fairseq's function; name wrong options."""
    try:
        return merge(options, cfg, remove_missing)
    except ConfigKeyError as error:
        raise ValueError(
            f"{cfg._get_full_key(error.key)} is not an option of {cfg._name}: the names are those "
            "of fairseq-train's options, with _ for -"
        ) from error


def keep_bf16_off_tpus() -> None:
    """Let ``--bf16`` train all registered models on a CPU or GPU if ``torch_xla`` is missing."""
    for name, complete in ARCH_CONFIG_REGISTRY.items():
        ARCH_CONFIG_REGISTRY[name] = partial(_complete_without_tpu, complete)


def _complete_without_tpu(complete: Callable[[Any], None], cfg: Any) -> None:
    """Complete options; unset the TPU that fairseq's command line infers from ``--bf16``."""
    complete(cfg)
    bf16 = isinstance(cfg, Namespace) and getattr(cfg, "bf16", False)
    if bf16 and importlib.util.find_spec("torch_xla") is None:
        cfg.tpu = False
