"""Choose the device, and load tokens and language models, for the commands that score a text."""

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fairseq_plugins.python_interface.language_model import LanguageModel
from fairseq_plugins.python_interface.loading import load
from fairseq_plugins.segment_language_model import split as splits
from scripts._shared.checkpoints import checkpoint_options, read_checkpoint
from scripts._shared.command_line import NamedFile


def choose_device(cpu: bool) -> torch.device:
    """Return the GPU if there is one, unless ``cpu`` is true."""
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


def load_tokens(data: Path, split: str) -> np.ndarray:
    """Return the tokens (N,) of a split in a folder that fairseq-preprocess wrote."""
    # imported after fairseq_plugins, which keeps fairseq from setting up logging
    from fairseq.data import Dictionary

    try:
        return splits.load_tokens(str(data / split), Dictionary.load(str(data / "dict.txt")))
    except FileNotFoundError as error:
        raise ValueError(f"--data {data}, --split {split}: {error}") from error


def load_model(
    checkpoint: NamedFile, arguments: argparse.Namespace, mem_len: int = 0, **overrides: Any
) -> LanguageModel:
    """Load a model whose tokens each see ``mem_len`` tokens back; for 0, their whole window."""
    # torch warns about fairseq's own attention in every batch with padding
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")
    task = checkpoint_options(read_checkpoint(checkpoint.path), "task")
    # fairseq's language_modeling has no recurrence to switch off
    if mem_len or task.get("_name") == "segment_language_modeling":
        overrides |= {"mem_len": mem_len, "same_length": mem_len > 0}
    return load(checkpoint.path, arguments.data, **overrides).to(choose_device(arguments.cpu))


def score(model: LanguageModel, arguments: argparse.Namespace, **options: Any) -> np.ndarray:
    """Return the losses in nats of a split's tokens, (N,), after ``load_tokens``.

    The split's warning about <unk>, which ``load_tokens`` gave, is not repeated.
    """
    splits.logger.setLevel(logging.ERROR)
    try:
        return model.score_split(arguments.split, batch_size=arguments.batch_size, **options)
    finally:
        splits.logger.setLevel(logging.NOTSET)
