"""Named architectures: the values that ``--arch NAME`` or ``model._name=NAME`` sets.

The command line or a Hydra configuration overrides them. fairseq calls the functions here only for
models of this package.
"""

import dataclasses
import importlib.util
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    register_model_architecture,
)
from fairseq.tasks import TASK_REGISTRY
from hydra.core.config_store import ConfigStore

# refuses the class of a task that a model cannot use
CheckTask = Callable[[type], None]


def register_presets(
    model: str, presets: dict[str, dict[str, Any]], check_task: CheckTask | None = None
) -> None:
    """Register named architectures of a registered model, with the values of their options.

    ``--arch`` calls ``check_task`` with the class of ``--task``, before fairseq sets up the task.
    """
    # fairseq has registered the model's own name
    ARCH_CONFIG_REGISTRY[model] = partial(_complete, {}, check_task)
    for name, values in presets.items():
        register_model_architecture(model, name)(partial(_complete, values, check_task))
        _register_dataclass(name, MODEL_DATACLASS_REGISTRY[model], values)


def _complete(values: dict[str, Any], check_task: CheckTask | None, args: Namespace) -> None:
    """Complete fairseq-train's options, in place, with a preset's values."""
    if check_task is not None and hasattr(args, "task"):
        check_task(TASK_REGISTRY[args.task])
    for option, value in values.items():
        if not hasattr(args, option):
            setattr(args, option, value)
    # fairseq infers a TPU from --bf16
    if getattr(args, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        args.tpu = False


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
