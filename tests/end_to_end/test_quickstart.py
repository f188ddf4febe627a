"""The quickstarts' own commands, run for real on small corpora with two updates."""

import json
import re

import pytest

from scripts.evaluate import translation as evaluate_translation
from scripts.prepare import _binarize, python_source
from scripts.quickstart import _steps as quickstart_steps
from scripts.quickstart import language_model as quickstart
from scripts.quickstart import translation
from tests.end_to_end.commands import ROOT, forked

# sentences of the translation quickstart
TESTED = 12


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """A working folder with the corpus of a small library: this repository's scripts."""
    folder = tmp_path_factory.mktemp("quickstart")
    library = folder / "library"
    library.mkdir()
    scripts = sorted((ROOT / "scripts").glob("*/[a-z]*.py"))
    for number in range(120):
        lines = scripts[number % len(scripts)].read_text(encoding="utf-8").splitlines()
        part = "".join(f"{line}\n" for line in lines[number : number + 20] if line.isascii())
        (library / f"m{number:03}.py").write_text(f"# {number}\n{part}")
    (library / "m000.py").write_text("".join(map(chr, range(32, 127))) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_binarize, "child_process", forked)
        patch.setattr(python_source, "WORKERS", 1)
        python_source.prepare(folder / "data", library, subwords=200)
    (folder / "checkpoints").mkdir()
    return folder


@pytest.mark.slow
def test_all_steps_after_the_corpus(output, monkeypatch, capsys):
    few = ["--max-update", "2", "--save-interval-updates", "1"]
    monkeypatch.setattr(quickstart, "FP32_OPTIONS", few)
    monkeypatch.setattr(quickstart, "BF16_OPTIONS", ["--bf16", *few])
    monkeypatch.setattr(quickstart, "prepare", lambda output: None)
    assert quickstart.main(["--output", str(output)]) == 0
    result = json.loads((output / "result.json").read_text())
    assert result["updates"] == 2
    figures = result["bits_per_character"]
    printed = capsys.readouterr().out
    for name in quickstart.RECURRENCES:
        # a model that has learnt nothing
        assert 1 < figures[f"model, recurrence {name}"] < 8
        assert f"{figures[f'model, recurrence {name}']:.4f}" in printed
    assert re.search(r"^100 %, +\d+ s: training \d", printed, re.MULTILINE)
    sample = printed.split("--seed 1\n\n")[-1]
    assert sample.startswith(quickstart.PROMPT)


@pytest.fixture(scope="module")
def translating():
    """The driver with a small corpus, two updates, and its children forked."""
    corpus = ["--train", "300", "--valid", "20", "--test", str(TESTED), "--seed", "1"]
    training = list(translation.TRAINING_OPTIONS)
    for name, value in (
        ("--max-update", "2"),
        ("--save-interval-updates", "1"),
        ("--max-tokens", "600"),
    ):
        training[training.index(name) + 1] = value
    # other processes take long to start
    preparation = [*translation.PREPARATION_OPTIONS, "--workers", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(translation, "CORPUS_OPTIONS", corpus)
        patch.setattr(translation, "PREPARATION_OPTIONS", preparation)
        patch.setattr(translation, "TRAINING_OPTIONS", training)
        for module in (translation, quickstart_steps, evaluate_translation, _binarize):
            patch.setattr(module, "child_process", forked)
        yield translation


@pytest.mark.slow
def test_all_steps_of_translation(translating, tmp_path, capfd):
    assert translating.main(["--output", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["updates"], result["sentences"]) == (2, TESTED)
    # hardly any pair is left out by its length
    assert result["pairs"]["train"] > 290
    assert result["pairs"]["test"] == TESTED
    examples = re.findall(r"^source: .*\ntranslation: .*\nreference: .*$", printed, re.MULTILINE)
    assert len(examples) == translating.EXAMPLES
    assert re.search(r"^2 updates, \d+ s of training: BLEU 0\.\d+, 0\.0 % exact", printed, re.M)

    # the same command again trains no further
    assert translating.main(["--output", str(tmp_path)]) == 0
    assert "2 of 2 updates done, nothing left to do" in capfd.readouterr().out
