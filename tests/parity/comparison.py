"""Compare the losses of an imported model with those of the original code, token by token.

A case is a folder with model.pt (or TensorFlow's model.ckpt-….index and data), config.json (with
"source" and "settings"), vocab.txt, text.txt, and expected.npz (losses in nats by setting).

The original may differ from itself by more than 2e-4 between settings that should not matter, such
as the block size of the adaptive-span code. Then we may differ from it by 1.5 times as much in the
root mean square over the tokens (the largest difference is a matter of chance, and changes with
the processor), and by no more than 1e-2 at any token.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from scripts.convert import checkpoint
from tests.end_to_end.commands import TASK, run

TOLERANCE = 2e-4
# limit for our root mean square difference, as a multiple of the original's own
TIMES_ROUNDING = 1.5
# limit for the difference at any token
MOST_ALLOWED = 1e-2
AGREES, ROUNDING, MISSED = "yes", "within the original's rounding", "NO"
# settings that evaluation may change
OVERRIDES = ("mem_len", "clamp_len", "same_length")
# a symbol and its log-probability, as fairseq-eval-lm prints them
WORD = re.compile(r"\S+ \[(-?\d+\.\d{6}|-?inf|nan)\]")


class Differences(NamedTuple):
    """Differences of a setting's losses from the original's; rounding: the original from itself."""

    tokens: int
    largest: float
    typical: float
    rounding: float

    @property
    def verdict(self):
        """Whether all losses agree as well as the original agrees with itself; NaN never agrees."""
        if self.largest <= TOLERANCE:
            return AGREES
        explained = self.typical <= TIMES_ROUNDING * self.rounding
        return ROUNDING if explained and self.largest <= MOST_ALLOWED else MISSED

    @property
    def cells(self):
        nats = (f"{value:.1e}" for value in (self.largest, self.typical, self.rounding))
        return [f"{self.tokens:,}", *nats, self.verdict]


class Case(NamedTuple):
    """A case's folder, its config.json, and the losses by setting in its expected.npz."""

    folder: Path
    config: dict
    expected: dict

    @classmethod
    def from_folder(cls, folder):
        with np.load(folder / "expected.npz") as losses:
            return cls(folder, json.loads((folder / "config.json").read_text()), dict(losses))

    def convert(self, folder):
        """Convert the model into a folder, and binarize the text there with its dictionary."""
        weights = next(self.folder.glob("*.index"), self.folder / "model.pt")
        words = ("--source", self.config["source"], "--checkpoint", weights, "--output", folder)
        words += ("--config", self.folder / "config.json", "--vocab", self.folder / "vocab.txt")
        assert checkpoint.main([*map(str, words)]) == 0
        text, symbols = f"--testpref={self.folder}/text.txt", f"--srcdict={folder}/dict.txt"
        run("fairseq-preprocess", "--only-source", text, symbols, "--destdir", folder / "data")

    def evaluate(self, folder, name):
        """Return the losses (T,) of the text in a setting, from fairseq-eval-lm."""
        setting = self.config["settings"][name]
        overrides = {key: setting[key] for key in OVERRIDES if key in setting}
        if overrides.get("clamp_len", 1) <= 0:
            overrides["clamp_len"] = None
        length = setting.get("tgt_len") or setting["block_size"]
        printed = run(
            *("fairseq-eval-lm", folder / "data", *TASK, "--path", folder / "checkpoint.pt"),
            *("--tokens-per-sample", length, "--batch-size", 1, "--gen-subset", "test", "--cpu"),
            *("--model-overrides", overrides, "--output-word-probs"),
        )
        return np.array([-float(score) for score in WORD.findall(printed)])

    def compare(self, name, losses):
        """Compare losses (T,), in the order of the text, with those expected for a setting."""
        expected = self.expected[name]
        assert losses.shape == expected.shape
        if self.config["source"] == "transformer-xl" and self.config["cutoffs"]:
            losses = losses[self.cluster_order(self.config["settings"][name]["tgt_len"])]
        difference = losses - expected
        largest, rounding = float(np.abs(difference).max()), 0.0
        if self.config["source"] == "adaptive-span":
            # the block size does not change how far back the model reads
            losses = [self.expected[other] for other in self.config["settings"]]
            rounding = max(root_mean_square(a - b) for a in losses for b in losses)
        return Differences(len(expected), largest, root_mean_square(difference), rounding)

    def cluster_order(self, segment):
        """Return the order in which the original Transformer-XL returns the losses of the tokens.

        With an adaptive softmax it returns the losses of a segment cluster by cluster.
        """
        symbols = (self.folder / "vocab.txt").read_text(encoding="utf-8").split("\n")
        numbers = {symbol: number for number, symbol in enumerate(symbols)}
        lines = (self.folder / "text.txt").read_text(encoding="utf-8").splitlines()
        tokens = [numbers[word] for line in lines for word in (*line.split(), "<eos>")]
        clusters = np.searchsorted(self.config["cutoffs"], tokens, side="right")
        # stable: tokens of a cluster stay in the order of the text
        return np.lexsort((clusters, np.arange(len(tokens)) // segment))


def root_mean_square(differences):
    return float(np.sqrt(np.square(differences, dtype=np.float64).mean()))
