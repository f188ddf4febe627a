"""Options of models, tasks, losses and optimizers."""

import logging
from dataclasses import field
from typing import Any

import torch

logger = logging.getLogger(__name__)


def option(default: Any, text: str) -> Any:
    """Return a dataclass field with a default and a help text."""
    return field(default=default, metadata={"help": text})


def flag(option: str) -> str:
    """Return the command-line form of an option: "--lr-scheduler" for "lr_scheduler"."""
    return "--" + option.replace("_", "-")


def warn_amp_without_gpu(options: object) -> None:
    """Warn of ``--amp`` on a machine without a GPU, where fairseq ignores it."""
    # without a root configuration, the value is the name of the option that has it
    if getattr(options, "amp", False) is True and not torch.cuda.is_available():
        logger.warning(
            "--amp needs a GPU: this machine computes in single precision, as without it; for "
            "half precision on a CPU give --bf16"
        )
