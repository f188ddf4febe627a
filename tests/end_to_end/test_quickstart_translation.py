"""The translation quickstart's own commands, run for real on few sentences with two updates."""

import json
import re

import pytest

from scripts.evaluate import translation as evaluate_translation
from scripts.prepare import _binarize
from scripts.quickstart import _steps as quickstart_steps
from scripts.quickstart import translation as quickstart
from tests.end_to_end.commands import forked

TESTED = 12


@pytest.fixture(scope="module")
def small():
    """The driver with a small corpus, two updates, and its children forked."""
    corpus = ["--train", "300", "--valid", "20", "--test", str(TESTED), "--seed", "1"]
    training = list(quickstart.TRAINING_OPTIONS)
    for name, value in (
        ("--max-update", "2"),
        ("--save-interval-updates", "1"),
        ("--max-tokens", "600"),
    ):
        training[training.index(name) + 1] = value
    # other processes take long to start
    preparation = [*quickstart.PREPARATION_OPTIONS, "--workers", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "CORPUS_OPTIONS", corpus)
        patch.setattr(quickstart, "PREPARATION_OPTIONS", preparation)
        patch.setattr(quickstart, "TRAINING_OPTIONS", training)
        for module in (quickstart, quickstart_steps, evaluate_translation, _binarize):
            patch.setattr(module, "child_process", forked)
        yield quickstart


def test_all_steps(small, tmp_path, capfd):
    assert small.main(["--output", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["updates"], result["sentences"]) == (2, TESTED)
    # hardly any pair is left out by its length
    assert result["pairs"]["train"] > 290
    assert result["pairs"]["test"] == TESTED
    examples = re.findall(r"^source: .*\ntranslation: .*\nreference: .*$", printed, re.MULTILINE)
    assert len(examples) == small.EXAMPLES
    assert re.search(r"^2 updates, \d+ s of training: BLEU 0\.\d+, 0\.0 % exact", printed, re.M)

    # the same command again trains no further
    assert small.main(["--output", str(tmp_path)]) == 0
    assert "2 of 2 updates done, nothing left to do" in capfd.readouterr().out
