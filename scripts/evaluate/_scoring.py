"""Load tokens and language models, and compute losses for each context, (N,) for N tokens."""

import argparse
import logging
import math
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


def context_losses(
    model: LanguageModel, context: int, arguments: argparse.Namespace, **options: Any
) -> np.ndarray:
    """Return the losses of a split in nats, (N,), in windows that predict --stride tokens.

    With a stride above 1, the size of a batch decides where windows begin.
    """
    # a window's first token has one token before it even without extended context
    windows = {"tokens_per_sample": arguments.stride, "extended_context": context - 1}
    return score(model, arguments, **windows, **options)


def longest_context(model: LanguageModel, stride: int) -> float:
    """Return how many tokens of context absolute positions allow; infinite for other positions."""
    if not model.has_past:
        positions = model.model.max_positions()
    elif model.model.decoder.network.absolute_positions is not None:
        # those of training
        positions = model.segment + model.context
    else:
        return math.inf
    if positions < stride:
        raise ValueError(
            f"--stride is {stride}, and a model was trained on segments of {positions} tokens: "
            "give a stride of at most that"
        )
    return positions - stride + 1
