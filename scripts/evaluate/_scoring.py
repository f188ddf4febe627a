"""What commands need to score a text with models: device, tokens, limits, differences, times."""

import math
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from fairseq_plugins.python_interface.language_model import LanguageModel
from fairseq_plugins.segment_language_model import streams
from scripts._shared.machine import synchronize

# Losses of neighbors depend on one another, those of distant tokens hardly: the means of so many
# parts of a text, each of at least so many tokens, are taken for independent.
PARTS, PART_TOKENS = 32, 512
# The 97.5% quantile of Student's t with PARTS - 1 degrees of freedom.
T_QUANTILE = 2.0395


def choose_device(cpu: bool) -> torch.device:
    """The GPU if there is one, unless the CPU is asked for."""
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


def load_tokens(data: Path, split: str) -> np.ndarray:
    """Tokens of a split, (N,), in a folder that fairseq-preprocess wrote."""
    # after fairseq_plugins, which keeps fairseq from setting up logging
    from fairseq.data import Dictionary

    if not (data / "dict.txt").is_file():
        raise ValueError(
            f"--data {data} has no dict.txt: name the folder that fairseq-preprocess wrote"
        )
    try:
        return streams.load_tokens(str(data / split), Dictionary.load(str(data / "dict.txt")))
    except FileNotFoundError as error:
        raise ValueError(f"--split {split}: {error}") from error


def paired_difference(losses: np.ndarray, reference: np.ndarray) -> tuple[float, float | None]:
    """Mean difference of two losses of the same tokens, (N,) each, and half its 95% interval.

    A text that is too short for an interval has None in its place.
    """
    differences = losses.astype(np.float64) - reference
    if len(differences) < PARTS * PART_TOKENS:
        return float(differences.mean()), None
    means = [float(part.mean()) for part in np.array_split(differences, PARTS)]
    half = T_QUANTILE * statistics.stdev(means) / math.sqrt(PARTS)
    return float(differences.mean()), half


@torch.no_grad()
def time_window(model: LanguageModel, tokens: np.ndarray, windows: int) -> float:
    """Median seconds, over ``windows`` runs, to read tokens (L,) anew and score the last one.

    The model must have no memory.
    """
    inputs = torch.from_numpy(tokens.astype(np.int64)).to(model.device).unsqueeze(0)
    seconds = []
    # the first run warms up
    for _ in range(windows + 1):
        synchronize(model.device)
        started = time.perf_counter()
        features, _ = model.model.decoder.extract_features(inputs)
        output = model.model.decoder.output_layer(features[:, -1:])
        sample = {"target": inputs[:, -1:]}
        model.model.get_normalized_probs((output, None), log_probs=True, sample=sample)
        synchronize(model.device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])
