"""What commands look at before they load a model: the tokens of a split, the device."""

from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary

from fairseq_plugins.segment_language_model import streams


def choose_device(cpu: bool) -> torch.device:
    """Device to compute on: a GPU when there is one, unless the CPU is asked for."""
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


def load_tokens(data: Path, split: str) -> np.ndarray:
    """Tokens of a split, (N,), in a folder that fairseq-preprocess wrote."""
    if not (data / "dict.txt").is_file():
        raise ValueError(
            f"--data {data} has no dict.txt: name the folder that fairseq-preprocess wrote"
        )
    try:
        return streams.load_tokens(str(data / split), Dictionary.load(str(data / "dict.txt")))
    except FileNotFoundError as error:
        raise ValueError(f"--split {split}: {error}") from error
