"""Losses of imported models beside those that the original code computed, token by token.

    python -m scripts.convert.check_parity FOLDER

FOLDER holds a folder for each case: model.pt, or TensorFlow's model.ckpt-….index and data;
config.json with "source" and "settings", vocab.txt, text.txt, and expected.npz with the losses of
each setting in nats. Each goes the way of a user:
scripts/convert/checkpoint.py, fairseq-preprocess with the imported dict.txt, fairseq-eval-lm with
--output-word-probs. Prints a table, and ends with 1 where a loss differs by more than 2e-4. Cases
of a source that scripts.convert.checkpoint does not read are named and left out.

The original may differ by more from itself, between two settings that make no difference, such as
the block size of the adaptive-span code: that is its rounding. Ours may then differ from it by
half as much again, as the root mean square over the tokens has it (the largest difference is a
matter of chance, and changes with the processor), and by no more than 1e-2 at any token.

The original Transformer-XL with an adaptive softmax returns the losses of a segment cluster by
cluster, not in the order of the text; so ours are put into that order for the comparison.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import ROOT, program, python_command, short
from scripts._shared.results import markdown_table
from scripts.convert.checkpoint import ADAPTIVE_SPAN, SOURCES, TENSORFLOW, TRANSFORMER_XL

TOLERANCE = 2e-4
# how much more than the original from itself we may differ from it, over all tokens
_TIMES_ROUNDING = 1.5
# and at any of them
_MOST_ALLOWED = 1e-2
AGREES, ROUNDING, MISSED = "yes", "within the original's rounding", "NO"
# what evaluation may change through --model-overrides
_OVERRIDES = ("mem_len", "clamp_len", "same_length")
# a symbol and its log-probability, as fairseq-eval-lm prints them
_WORD = re.compile(r"\S+ \[(-?\d+\.\d{6}|-?inf|nan)\]")


class Row(NamedTuple):
    """What was compared in a setting of a case; differences of losses are in nats.

    Args:
        case: its name.
        setting: the setting's name.
        tokens: how many losses were compared.
        largest: of the differences from the original.
        typical: their root mean square.
        rounding: the root mean square of the original's differences from itself.
        perplexity: by our losses.
    """

    case: str
    setting: str
    tokens: int
    largest: float
    typical: float
    rounding: float
    perplexity: float

    @property
    def verdict(self) -> str:
        """Whether all losses agree, as far as the original agrees with itself; not so for NaN."""
        if self.largest <= TOLERANCE:
            return AGREES
        explained = self.typical <= _TIMES_ROUNDING * self.rounding
        return ROUNDING if explained and self.largest <= _MOST_ALLOWED else MISSED


def run_quietly(words: list[str]) -> str:
    """Output of a command of this environment.

    Raises ValueError with its last lines when it fails.
    """
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-12:])
        raise ValueError(f"{' '.join(words)} ended with exit status {done.returncode}:\n{last}")
    return done.stdout + done.stderr


def read_config(case: Path) -> dict[str, Any]:
    """Options of a case's model, its source and settings among them.

    Raises ValueError when these are not there.
    """
    config = json.loads((case / "config.json").read_text(encoding="utf-8"))
    for name in ("source", "settings"):
        if name not in config:
            raise ValueError(f"{case.name}: config.json lacks {name}")
    return config


def import_case(case: Path, config: dict[str, Any], folder: Path) -> None:
    """Import a case's model, and binarize its text with the imported dictionary."""
    bundles = sorted(case.glob("*.index")) if config["source"] == TENSORFLOW else []
    weights = next(iter(bundles), case / "model.pt")
    words = [*python_command("convert.checkpoint"), "--source", config["source"]]
    words += ["--checkpoint", f"{weights}", "--config", f"{case}/config.json"]
    run_quietly([*words, "--vocab", f"{case}/vocab.txt", "--output", f"{folder}/model"])
    words = [program("fairseq-preprocess"), "--only-source", "--testpref", f"{case}/text.txt"]
    run_quietly([*words, "--srcdict", f"{folder}/model/dict.txt", "--destdir", f"{folder}/data"])


def read_losses(folder: Path, setting: dict[str, Any]) -> np.ndarray:
    """Loss of each token, in nats, that fairseq-eval-lm computes."""
    length = setting["tgt_len"] if "tgt_len" in setting else setting["block_size"]
    overrides = {name: setting[name] for name in _OVERRIDES if name in setting}
    if (overrides.get("clamp_len") or 0) <= 0 and "clamp_len" in overrides:
        overrides["clamp_len"] = None
    printed = run_quietly(
        [
            *(program("fairseq-eval-lm"), str(folder / "data"), "--user-dir", "fairseq_plugins"),
            *("--task", "segment_language_modeling", "--tokens-per-sample", str(length)),
            *("--path", str(folder / "model" / "checkpoint.pt"), "--gen-subset", "test"),
            *("--batch-size", "1", "--model-overrides", str(overrides), "--output-word-probs"),
            *("--distributed-world-size", "1", "--cpu"),
        ]
    )
    return np.array([-float(score) for score in _WORD.findall(printed)])


def cluster_order(case: Path, config: dict[str, Any], segment: int) -> np.ndarray:
    """Where the original Transformer-XL has the loss of each token: see above."""
    symbols = (case / "vocab.txt").read_text(encoding="utf-8").split("\n")
    numbers = {symbol: number for number, symbol in enumerate(symbols)}
    lines = (case / "text.txt").read_text(encoding="utf-8").splitlines()
    tokens = [numbers[word] for line in lines for word in (*line.split(), "<eos>")]
    clusters = np.searchsorted(config["cutoffs"], tokens, side="right")
    # stable: within a cluster the order is that of the text
    return np.lexsort((clusters, np.arange(len(tokens)) // segment))


def root_mean_square(differences: np.ndarray) -> float:
    """Square root of the mean of squares."""
    return float(np.sqrt(np.square(differences, dtype=np.float64).mean()))


def own_rounding(expected: dict[str, np.ndarray], config: dict[str, Any]) -> float:
    """How much the original differs from itself between settings that make no difference.

    It is the root mean square over the tokens, between the two settings that differ most.
    """
    if config["source"] != ADAPTIVE_SPAN:
        return 0.0
    # one block size reads as much as another
    losses = [expected[name] for name in config["settings"]]
    return max(root_mean_square(one - other) for one in losses for other in losses)


def compare(case: Path, bar: tqdm) -> list[Row]:
    """Compare a case's losses in all of its settings.

    Raises ValueError when settings or tokens are missing.
    """
    config = read_config(case)
    rows = []
    with np.load(case / "expected.npz") as expected, tempfile.TemporaryDirectory() as temporary:
        lacking = set(config["settings"]) - set(expected)
        if lacking:
            raise ValueError(f"{case.name}: expected.npz has no {', '.join(sorted(lacking))}")
        rounding = own_rounding(expected, config)
        import_case(case, config, Path(temporary))
        for name, setting in config["settings"].items():
            found, wanted = read_losses(Path(temporary), setting), expected[name]
            if found.shape != wanted.shape:
                raise ValueError(
                    f"{case.name}, {name}: {len(found)} tokens were scored, not {len(wanted)}"
                )
            perplexity = float(np.exp(found.mean()))
            if config["source"] == TRANSFORMER_XL and config["cutoffs"]:
                found = found[cluster_order(case, config, setting["tgt_len"])]
            differences = found - wanted
            largest, typical = float(np.abs(differences).max()), root_mean_square(differences)
            rows.append(Row(case.name, name, len(found), largest, typical, rounding, perplexity))
            bar.update()
    return rows


def format_table(rows: list[Row]) -> str:
    """Table of the settings in Markdown."""
    headers = ["case", "setting", "tokens compared", "largest difference", "root mean square"]
    headers += ["the original's own", "perplexity", "agrees"]
    cells = []
    for row in rows:
        differences = (f"{nats:.1e}" for nats in (row.largest, row.typical, row.rounding))
        what = row.case, row.setting, f"{row.tokens:,}"
        cells.append([*what, *differences, f"{row.perplexity:.2f}", row.verdict])
    return markdown_table(headers, cells)


def check_parity(folder: Path) -> bool:
    """Compare the cases of a folder, print the table, and tell whether all agree.

    Raises ValueError when there are none, or a command fails.
    """
    found = sorted(path.parent for path in folder.resolve().glob("*/expected.npz"))
    if not found:
        raise ValueError(f"{short(folder.resolve())} has no case: no folder with expected.npz")
    sources = {case: read_config(case)["source"] for case in found}
    cases = [case for case in found if sources[case] in SOURCES]
    left_out = [f"{case.name} ({sources[case]})" for case in found if case not in cases]
    if not cases:
        raise ValueError(
            f"{short(folder.resolve())} has no case of {', '.join(SOURCES)}, only "
            f"{', '.join(left_out)}"
        )
    settings = sum(len(read_config(case)["settings"]) for case in cases)
    with tqdm(total=settings, desc="parity", unit="setting", disable=None) as bar:
        rows = [row for case in cases for row in compare(case, bar)]
    print(format_table(rows))
    verdicts = [row.verdict for row in rows]
    print(
        f"\n{verdicts.count(AGREES)} of {len(rows)} settings agree within {TOLERANCE} nats, token "
        f"by token; {verdicts.count(ROUNDING)} differ by more, but not more than the original's "
        f"rounding explains; {verdicts.count(MISSED)} missed"
    )
    if left_out:
        print(f"Left out, as nothing here reads their source: {', '.join(left_out)}")
    return MISSED not in verdicts


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path, help="the cases")
    parsed = parser.parse_args(arguments)
    agreed = []
    status = exit_status(lambda: agreed.append(check_parity(parsed.folder)))
    return status or int(not agreed[0])


if __name__ == "__main__":
    sys.exit(main())
