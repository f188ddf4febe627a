"""Score a line with a model as from Python: ``_faults_load CHECKPOINT DATA [float64]``.

A program of a campaign of faults: it prints the log-probabilities of the symbols.
"""

import sys

import torch

from fairseq_plugins import load
from scripts._shared.command_line import exit_status

LINE = " ".join(["the cat sat on a mat dog ran far away"] * 30)


def score() -> None:
    """Load the model, and print what it says of the line; raises as load."""
    checkpoint, data, *dtype = sys.argv[1:]
    model = load(checkpoint, data=data)
    if dtype:
        model.to(getattr(torch, dtype[0]))
    print(*model.score(LINE).log_probs.tolist())


if __name__ == "__main__":
    sys.exit(exit_status(score))
