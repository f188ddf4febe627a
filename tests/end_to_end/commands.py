"""fairseq's commands as a user runs them, each in a process of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "fairseq_plugins"
TASK = ["--user-dir", str(PLUGIN), "--task", "segment_language_modeling"]
MODEL = [
    *("--arch", "all_attention_lm", "--decoder-layers", "2", "--decoder-embed-dim", "16"),
    *("--decoder-attention-heads", "2", "--persistent-vectors", "4", "--attention-span", "12"),
]


def environment(**extra):
    """The environment of a command: one thread, so that tests can run side by side."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def start(command, *words, **extra):
    """Start a fairseq command and return its process."""
    module = command.removeprefix("fairseq-").replace("-", "_")
    return subprocess.Popen(
        [sys.executable, "-m", f"fairseq_cli.{module}", *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**extra),
        cwd=ROOT,
    )


def run(command, *words, text="", fails=False):
    """Run a fairseq command to its end and return what it printed."""
    process = start(command, *words)
    printed, _ = process.communicate(text, timeout=300)
    assert (process.returncode != 0) == fails, printed[-4000:]
    return printed


def train(data, folder, *options, model=MODEL, fails=False):
    """Train a small model in ``folder``: 4 streams, segments of 8, plain gradient descent."""
    return run(
        "fairseq-train",
        data,
        *TASK,
        *model,
        *("--tokens-per-sample", 8, "--batch-size", 4, "--optimizer", "sgd", "--lr", 0.5),
        *("--save-dir", folder, "--log-format", "simple", "--no-epoch-checkpoints"),
        *options,
        fails=fails,
    )


def evaluate(data, checkpoint, *options, fails=False):
    """Run fairseq-eval-lm on the test split and return what it printed."""
    return run(
        "fairseq-eval-lm",
        data,
        *TASK,
        *("--path", checkpoint, "--gen-subset", "test", "--no-progress-bar"),
        *options,
        fails=fails,
    )


def tokens_evaluated(printed):
    """Return the number of tokens in the log of fairseq-eval-lm."""
    return int(re.search(r"Evaluated ([\d,]+) tokens", printed)[1].replace(",", ""))


def loss(printed):
    """Return the loss in the log of fairseq-eval-lm: bits a token."""
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", printed)[1])


def log_probabilities(printed):
    """Return the tokens' log-probabilities from --output-word-probs, in nats, in order."""
    return [float(number) for number in re.findall(r"\[(-\d+\.\d+)\]", printed)]
