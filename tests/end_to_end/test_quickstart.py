"""The quickstarts' own commands, run for real on small corpora with two updates."""

import json
import re

import pytest

from scripts.evaluate import translation as evaluate_translation
from scripts.prepare import _binarize, python_source
from scripts.quickstart import _steps as quickstart_steps
from scripts.quickstart import language_model as quickstart
from scripts.quickstart import translation
from tests.end_to_end.commands import ROOT, run_forked


@pytest.mark.slow
def test_all_steps_after_the_corpus(tmp_path, monkeypatch, capsys):
    # a corpus from a small library, which is made of this repository's scripts
    library = tmp_path / "library"
    library.mkdir()
    scripts = sorted((ROOT / "scripts").glob("*/[a-z]*.py"))
    for number in range(120):
        lines = scripts[number % len(scripts)].read_text(encoding="utf-8").splitlines()
        part = "".join(f"{line}\n" for line in lines[number : number + 20] if line.isascii())
        (library / f"m{number:03}.py").write_text(f"# {number}\n{part}")
    (library / "m000.py").write_text("".join(map(chr, range(32, 127))) + "\n")
    monkeypatch.setattr(_binarize, "child_process", run_forked)
    monkeypatch.setattr(python_source, "WORKERS", 1)
    python_source.prepare(tmp_path / "data", library, subwords=200)
    (tmp_path / "checkpoints").mkdir()
    few = ["--max-update", "2", "--save-interval-updates", "1"]
    monkeypatch.setattr(quickstart, "FP32_OPTIONS", few)
    monkeypatch.setattr(quickstart, "BF16_OPTIONS", ["--bf16", *few])
    monkeypatch.setattr(quickstart, "prepare", lambda output: None)
    assert quickstart.main(["--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["updates"] == 2
    figures = result["bits_per_character"]
    printed = capsys.readouterr().out
    for name in quickstart.RECURRENCES:
        # a model that has learned nothing
        assert 1 < figures[f"model, recurrence {name}"] < 8
        assert f"{figures[f'model, recurrence {name}']:.4f}" in printed
    assert re.search(r"^100 %, +\d+ s: training \d", printed, re.MULTILINE)
    assert printed.split("--seed 1\n\n")[-1].startswith(quickstart.PROMPT)
    assert "2,000 tokens of the test part" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_all_steps_of_translation(tmp_path, monkeypatch, capfd):
    corpus = ["--train", "300", "--valid", "20", "--test", "12", "--seed", "1"]
    training = list(translation.TRAINING_OPTIONS)
    few = {"--max-update": "2", "--save-interval-updates": "1", "--max-tokens": "600"}
    for name, value in few.items():
        training[training.index(name) + 1] = value
    # worker processes take long to start
    preparation = [*translation.PREPARATION_OPTIONS, "--workers", "1"]
    monkeypatch.setattr(translation, "CORPUS_OPTIONS", corpus)
    monkeypatch.setattr(translation, "PREPARATION_OPTIONS", preparation)
    monkeypatch.setattr(translation, "TRAINING_OPTIONS", training)
    for module in (translation, quickstart_steps, evaluate_translation, _binarize):
        monkeypatch.setattr(module, "child_process", run_forked)
    assert translation.main(["--output", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["updates"], result["sentences"], result["pairs"]["test"]) == (2, 12, 12)
    # hardly any pair is dropped because of its length
    assert result["pairs"]["train"] > 290
    assert "the first pair of the test part" in (tmp_path / "page.html").read_text(encoding="utf-8")
    examples = re.findall(r"^source: .*\ntranslation: .*\nreference: .*$", printed, re.MULTILINE)
    assert len(examples) == translation.EXAMPLES
    assert re.search(r"^2 updates, \d+ s of training: BLEU 0\.\d+, 0\.0 % exact", printed, re.M)
    # the same command again trains no further
    assert translation.main(["--output", str(tmp_path)]) == 0
    assert "2 of 2 updates done, nothing left to do" in capfd.readouterr().out
