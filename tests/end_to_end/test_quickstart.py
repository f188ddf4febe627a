"""The quickstarts' own commands, run for real on small corpora with two updates."""

import json
import re

import pytest

from scripts.evaluate import translation as evaluate_translation
from scripts.prepare import _binarize, python_source
from scripts.quickstart import _steps as steps
from scripts.quickstart import language_model, translation
from tests.end_to_end.commands import ROOT, run_here


def replaced(words, **values):
    """Return command line words with other values of some options."""
    words = list(words)
    for name, value in values.items():
        words[words.index(f"--{name.replace('_', '-')}") + 1] = value
    return words


@pytest.mark.slow
def test_all_steps_of_the_language_model(tmp_path, monkeypatch, capsys):
    # a corpus from a small library, which is made of this repository's scripts
    library = tmp_path / "library"
    library.mkdir()
    scripts = sorted((ROOT / "scripts").glob("*/[a-z]*.py"))
    for number in range(120):
        lines = scripts[number % len(scripts)].read_text(encoding="utf-8").splitlines()
        part = "".join(f"{line}\n" for line in lines[number : number + 20] if line.isascii())
        (library / f"m{number:03}.py").write_text(f"# {number}\n{part}")
    (library / "m000.py").write_text("".join(map(chr, range(32, 127))) + "\n")
    monkeypatch.setattr(_binarize, "child_process", run_here)
    monkeypatch.setattr(python_source, "WORKERS", 1)
    python_source.prepare(tmp_path / "data", library, subwords=200)
    few = replaced(language_model.TRAINING, max_update="2", save_interval_updates="1")
    monkeypatch.setattr(language_model, "TRAINING", few)
    run = steps.child_process

    def skip_the_corpus(words, log=None):
        return run(["true"] if "scripts.prepare.python_source" in words else words, log)

    monkeypatch.setattr(steps, "child_process", skip_the_corpus)
    assert language_model.main(["--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["updates"] == 2
    figures = result["bits_per_character"]
    printed = capsys.readouterr().out
    for name in language_model.RECURRENCES:
        # a model that has learned nothing
        assert 1 < figures[f"model, recurrence {name}"] < 8
        assert f"{figures[f'model, recurrence {name}']:.4f}" in printed
    assert re.search(rf"\n\n{language_model.PROMPT}.*\n\npage: ", printed, re.DOTALL)
    assert "<html" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_all_steps_of_translation(tmp_path, monkeypatch, capfd):
    corpus = replaced(translation.CORPUS, train="300", valid="20", test="12")
    few = {"max_update": "2", "save_interval_updates": "1", "max_tokens": "600"}
    monkeypatch.setattr(translation, "CORPUS", corpus)
    monkeypatch.setattr(translation, "TRAINING", replaced(translation.TRAINING, **few))
    # worker processes take long to start
    monkeypatch.setattr(translation, "PREPARATION", [*translation.PREPARATION, "--workers", "1"])
    for module in (steps, evaluate_translation, _binarize):
        monkeypatch.setattr(module, "child_process", run_here)
    assert translation.main(["--output", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    scores = json.loads((tmp_path / "evaluation/scores.json").read_text())
    assert scores["sentences"] == 12
    sizes = json.loads((tmp_path / "data/preparation.json").read_text())["parts"]
    # hardly any pair is dropped because of its length
    assert sizes["train"]["kept"] > 290
    examples = re.findall(r"^source: .*\ntranslation: .*\nreference: .*$", printed, re.MULTILINE)
    assert len(examples) == 10
    assert re.search(r"^2 updates, \d+ s of training", printed, re.MULTILINE)
    assert (tmp_path / "checkpoints/train.log").read_text().count('"valid_num_updates"') >= 1
    # the same command again trains no further
    assert translation.main(["--output", str(tmp_path)]) == 0
    assert "2 updates" in capfd.readouterr().out
