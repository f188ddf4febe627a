"""Converted models have the losses of the original code, with the commands that users run.

These are scripts.convert.checkpoint, fairseq-preprocess with the dict.txt that it writes, and
fairseq-eval-lm. Cases come from the folder in PARITY_CASES; small ones are made with float64
references (tests/reference). A case is a folder with model.pt (or TensorFlow's model.ckpt-….index
and data), config.json (with "source" and "settings"), vocab.txt, text.txt, and expected.npz (losses
in nats by setting).

The original may differ from itself by more than 2e-4 between settings that should not matter, such
as the block size of the adaptive-span code. Then we may differ from it by 1.5 times as much in the
root mean square over the tokens (the largest difference is a matter of chance, and changes with
the processor), and by no more than 1e-2 at any token.
"""

import json
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import fairseq_plugins
from scripts.convert import SOURCES, checkpoint
from tests.end_to_end.commands import ROOT, TASK, log_probabilities, run
from tests.scripts.convert.foreign_models import CUTOFFS, adaptive_span, transformer_xl
from tests.scripts.convert.foreign_models import transformer_xl_tensorflow as in_tensorflow

TOLERANCE = 2e-4
# limit for our root mean square difference, as a multiple of the original's own
TIMES_ROUNDING = 1.5
# limit for the difference at any token
MOST_ALLOWED = 1e-2
# settings that evaluation may change
OVERRIDES = ("mem_len", "clamp_len", "same_length")
BESIDE = ROOT.parent / "shared" / "parity"
CASES = Path(os.environ.get("PARITY_CASES", BESIDE)).resolve()
FOLDERS = sorted(path.parent for path in CASES.glob("*/expected.npz"))
if "PARITY_CASES" in os.environ and not FOLDERS:
    raise ValueError(f"PARITY_CASES is {CASES}, which has no folder with expected.npz")


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
        return -np.array(log_probabilities(printed))

    def agrees(self, name, losses):
        """Compare losses (T,), in the order of the text, with those expected for a setting."""
        expected = self.expected[name]
        assert losses.shape == expected.shape
        if self.config["source"] == "transformer-xl" and self.config["cutoffs"]:
            losses = losses[self.cluster_order(self.config["settings"][name]["tgt_len"])]
        largest, typical = np.abs(losses - expected).max(), root_mean_square(losses - expected)
        rounding = 0.0
        if self.config["source"] == "adaptive-span":
            # the block size does not change how far back the model reads
            others = [self.expected[other] for other in self.config["settings"]]
            rounding = max(root_mean_square(a - b) for a in others for b in others)
        # pytest -rP shows this
        print(
            f"{self.folder.name} {name}: {len(expected)} tokens, largest difference {largest:.1e}"
        )
        print(f"root mean square {typical:.1e}, of the original from itself {rounding:.1e}")
        within_rounding = typical <= TIMES_ROUNDING * rounding and largest <= MOST_ALLOWED
        # NaN never agrees
        return bool(largest <= TOLERANCE or within_rounding)

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


SETTINGS = [
    pytest.param(folder, name, id=f"{folder.name}-{name}")
    for folder in FOLDERS
    for name in Case.from_folder(folder).config["settings"]
]
NO_CASES = "no losses of the original code: name their folder in PARITY_CASES"
SEGMENTS = {"t7": {"tgt_len": 7, "mem_len": 10, "same_length": False, "clamp_len": -1}}
BLOCKS = {"t7": {"block_size": 7}, "t1": {"block_size": 1}}


@pytest.fixture(scope="module")
def converted(request, tmp_path_factory):
    case, folder = Case.from_folder(request.param), tmp_path_factory.mktemp("converted")
    if case.config["source"] not in SOURCES:
        pytest.skip(f"nothing here reads checkpoints of {case.config['source']}")
    case.convert(folder / "model")
    return case, folder / "model"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("converted", "setting"),
    SETTINGS or [pytest.param(None, "", marks=pytest.mark.skip(NO_CASES))],
    indirect=["converted"],
)
def test_losses_equal_the_originals(converted, setting):
    case, folder = converted
    assert case.agrees(setting, case.evaluate(folder, setting))


def write_case(foreign, folder, settings):
    """Write a case of a small model; return its losses by setting, in the order of the text."""
    config = {**foreign.config, "source": foreign.source, "settings": settings}
    (foreign.write(folder) / "config.json").write_text(json.dumps(config))
    words = [symbol for symbol in foreign.symbols if symbol != "<eos>"]
    text = [
        [words[(5 * line + 7 * i + i // 4) % len(words)] for i in range(line)]
        for line in range(1, 10)
    ]
    joined = "".join(" ".join(line) + "\n" for line in text)
    (folder / "text.txt").write_text(joined, encoding="utf-8")
    following = [foreign.symbols.index(word) for line in text for word in (*line, "<eos>")]
    numbers = [foreign.symbols.index("<eos>"), *following[:-1]]
    losses, expected = {}, {}
    for name, setting in settings.items():
        scores = foreign.log_probabilities(numbers, **setting)
        losses[name] = expected[name] = -scores[range(len(scores)), following].float().numpy()
        if foreign.source == "transformer-xl":
            order = Case(folder, config, {}).cluster_order(setting["tgt_len"])
            expected[name] = losses[name][order]
    np.savez(folder / "expected.npz", **expected)
    return losses


def trained_losses(folder):
    """Train a converted model for two updates in segments of 7 tokens; return losses in nats."""
    options = shlex.split((folder / "options.txt").read_text(encoding="utf-8"))
    dropouts = ("dropout", "attention-dropout", "activation-dropout", "embed-dropout")
    off = [word for name in (*dropouts, "output-dropout") for word in (f"--{name}", 0)]
    spans = ("--span-loss", 1e-6) if "--adaptive-span" in options else ()
    printed = run(
        *("fairseq-train", folder / "data", *TASK, *options, *off, "--train-subset", "test"),
        *("--criterion", "segment_loss", *spans, "--ddp-backend", "legacy_ddp"),
        *("--finetune-from-model", folder / "checkpoint.pt", "--tokens-per-sample", 7),
        *("--batch-size", 1, "--optimizer", "sgd", "--lr", 0.01, "--max-update", 2, "--cpu"),
        *("--disable-validation", "--no-save", "--log-format", "simple", "--log-interval", 1),
    )
    return [float(bits) * np.log(2) for bits in re.findall(r"train_inner.* loss=([\d.]+)", printed)]


@pytest.mark.parametrize(
    ("foreign", "settings"),
    [
        (transformer_xl(CUTOFFS, 2), SEGMENTS),
        (transformer_xl(CUTOFFS, hugging_face=True), SEGMENTS),
        (in_tensorflow(CUTOFFS, 2), SEGMENTS),
        (adaptive_span(cutoffs=CUTOFFS), BLOCKS),
    ],
)
def test_converted_models_equal_a_reference_and_are_trained(tmp_path, foreign, settings):
    losses = write_case(foreign, tmp_path / "case", settings)
    case = Case.from_folder(tmp_path / "case")
    case.convert(tmp_path / "model")
    for setting in settings:
        actual = case.evaluate(tmp_path / "model", setting)
        assert case.agrees(setting, actual)
        np.testing.assert_allclose(actual, losses[setting], atol=2e-4)
        # a changed loss is detected
        actual[11] += 1e-3
        assert not case.agrees(setting, actual)
    text = (tmp_path / "case" / "text.txt").read_text(encoding="utf-8")
    score = fairseq_plugins.load(tmp_path / "model", tokens_per_sample=7).score(text)
    np.testing.assert_allclose(-score.log_probs, losses["t7"], atol=2e-4)
    first, _ = trained_losses(tmp_path / "model")
    assert first == pytest.approx(losses["t7"][:7].mean(), abs=1e-3)
