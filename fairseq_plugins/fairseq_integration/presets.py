"""Named architectures: the values that ``--arch NAME`` or ``model._name=NAME`` sets.

They stand where the command, or under Hydra the configuration, is silent. A saved model has the
values that it was trained with; options that are newer than it have their defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import fairseq.models
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    register_model_architecture,
)
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from fairseq_plugins.fairseq_integration.distributed import check_training

# by its name: the values of a preset, and the options of its model with their defaults
_PRESETS: dict[str, tuple[dict[str, Any], type | None]] = {}


def register_presets(
    model: str, presets: dict[str, dict[str, Any]], options: type | None = None
) -> None:
    """Register named architectures of a model.

    The model's own name becomes a preset without values, so that ``--arch`` treats it like others.

    Args:
        model: the name that the model is registered by.
        presets: values of the model's options, by the name of the preset.
        options: dataclass of the options that fairseq's model does not have, of a model that is
            registered without a dataclass.
    """
    configured = model in MODEL_DATACLASS_REGISTRY
    for name, values in [(model, {}), *presets.items()]:
        _PRESETS[name] = values, MODEL_DATACLASS_REGISTRY[model] if configured else options
        complete = partial(_complete_parsed, values, options)
        if name in ARCH_MODEL_REGISTRY:
            ARCH_CONFIG_REGISTRY[name] = complete
        else:
            # fairseq registers the name of a model only where that has a dataclass
            register_model_architecture(model, name)(complete)
        if name != model and configured:
            _register_dataclass(name, MODEL_DATACLASS_REGISTRY[model], values)


def _register_dataclass(name: str, base: type, values: dict[str, Any]) -> None:
    """Register a model's options with a preset's values as defaults, which Hydra merges."""
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


def _complete_parsed(values: dict[str, Any], options: type | None, cfg: Any) -> None:
    """Complete the options of ``--arch`` in place, as fairseq asks for.

    Those of a model without a dataclass are all there then: its checkpoints tell all of them.
    """
    if OmegaConf.is_config(cfg):
        return
    for option, value in {**_defaults(options), **values}.items():
        if not hasattr(cfg, option):
            setattr(cfg, option, value)
    _keep_bf16_off_tpus(cfg)


def _fields(options: type | None) -> tuple[dataclasses.Field, ...]:
    found = () if options is None else dataclasses.fields(options)
    return tuple(option for option in found if not option.name.startswith("_"))


def _defaults(options: type | None) -> dict[str, Any]:
    # an interpolation is of a configuration, which parsed options are not in
    found = {option.name: option.default for option in _fields(options)}
    return {name: value for name, value in found.items() if not str(value).startswith("${")}


def apply_presets() -> None:
    """Let fairseq complete the options of presets where it builds a model."""
    fairseq.models.build_model = functools.wraps(fairseq.models.build_model)(
        partial(_build_model, fairseq.models.build_model)
    )


def _build_model(
    build: Callable[..., Any], cfg: Any, task: Any, from_checkpoint: bool = False
) -> Any:
    """Build a model with fairseq's function, after its options were completed in place.

    Raises:
        ValueError: a configuration has an option that the model does not have, or a value that is
            another kind of number than the option; or the model does not go with how its training
            is shared out.
    """
    name = getattr(cfg, "_name", None) or getattr(cfg, "arch", None)
    if name in _PRESETS:
        values, options = _PRESETS[name]
        if from_checkpoint:
            _add_newer_options(cfg, options)
        if OmegaConf.is_config(cfg) and name not in MODEL_DATACLASS_REGISTRY:
            _check_names(cfg, name)
            wanted = {**_defaults(options), **values}
            with open_dict(cfg):
                cfg.update({name: value for name, value in wanted.items() if name not in cfg})
            cfg = _parsed(cfg)
        _check_numbers(cfg, options)
        model = build(cfg, task, from_checkpoint)
        if not from_checkpoint:
            check_training(cfg, model)
        return model
    return build(cfg, task, from_checkpoint)


def _add_newer_options(cfg: Any, options: type | None) -> None:
    """Give options that a checkpoint lacks the values with which it was trained.

    They are the defaults, or the metadata ``older_checkpoints`` where the default is another since.
    """
    for option in _fields(options):
        if not hasattr(cfg, option.name):
            with open_dict(cfg) if OmegaConf.is_config(cfg) else nullcontext():
                setattr(cfg, option.name, option.metadata.get("older_checkpoints", option.default))


def _check_numbers(cfg: Any, options: type | None) -> None:
    """Raise ``ValueError`` for an option that is another kind of number than it should be.

    fairseq's parser sees to most of it, but not in ``--model-overrides``.
    """
    kinds = {} if options is None else typing.get_type_hints(options)
    for option in _fields(options):
        allowed = {kinds[option.name], *typing.get_args(kinds[option.name])} & {int, float}
        value = getattr(cfg, option.name, None)
        if not allowed or value is None:
            continue
        wanted = "a finite number" if float in allowed else "a whole number"
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or (float not in allowed and value % 1):
            raise ValueError(
                f"--{option.name.replace('_', '-')} is {value!r}: it must be {wanted} (with a "
                f"trained model: --model-overrides \"{{'{option.name}': ...}}\")"
            )


def _check_names(cfg: DictConfig, name: str) -> None:
    """Raise ``ValueError`` for an option that the model's parser does not know."""
    parser = ArgumentParser(add_help=False)
    ARCH_MODEL_REGISTRY[name].add_args(parser)
    known = {"_name", "arch", *(action.dest for action in parser._actions)}
    for option in cfg:
        if option not in known:
            raise ValueError(
                f"model.{option} is no option of {ARCH_MODEL_NAME_REGISTRY[name]}: the names are "
                "those of fairseq-train's options with _ for -"
            )


def _parsed(cfg: DictConfig) -> Namespace:
    """Return the options of a model that takes parsed arguments, with all groups' beside them."""
    root = cfg._get_root()
    found = {}
    for group in root.values() if root is not cfg else ():
        if isinstance(group, DictConfig):
            found.update((name, value) for name, value in group.items_ex(resolve=True))
    if "optimizer" in root and isinstance(root.optimizer, DictConfig):
        found["optimizer"] = root.optimizer.get("_name")
    return Namespace(**{**found, **OmegaConf.to_container(cfg, resolve=True)})


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
