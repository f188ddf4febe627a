"""Named architectures: the values that ``--arch NAME`` sets where the command line is silent."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture


def register_presets(model: str, presets: dict[str, dict[str, Any]]) -> None:
    """Register ``presets`` (name to values of the model's options) as architectures of ``model``.

    The model's own name becomes a preset without values, so that all of them share one behaviour.
    """
    ARCH_CONFIG_REGISTRY[model] = _preset({})
    for name, values in presets.items():
        register_model_architecture(model, name)(_preset(values))


def _preset(values: dict[str, Any]) -> Callable[[Any], None]:
    def apply(cfg: Any) -> None:
        for option, value in values.items():
            if not hasattr(cfg, option):
                setattr(cfg, option, value)
        if isinstance(cfg, Namespace):
            _keep_bf16_off_tpus(cfg)

    return apply


def _keep_bf16_off_tpus(args: Namespace) -> None:
    """Undo that fairseq's command line takes --bf16 to mean a TPU, where there can be none.

    GPUs and CPUs compute in bfloat16 too; fairseq would go looking for torch_xla.
    """
    if getattr(args, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        args.tpu = False
