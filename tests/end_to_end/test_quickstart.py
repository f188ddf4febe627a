"""The quickstarts' own commands, run for real on small corpora with two updates."""

import json
import re

import pytest

from scripts.evaluate import translation as evaluate_translation
from scripts.prepare import _binarize
from scripts.quickstart import _steps as steps
from scripts.quickstart import language_model, translation
from tests.end_to_end.commands import prepare_python, run_here

pytestmark = pytest.mark.slow


def replaced(words, **values):
    """Return command line words with other values of some options."""
    words = list(words)
    for name, value in values.items():
        words[words.index(f"--{name.replace('_', '-')}") + 1] = value
    return words


def test_all_steps_of_the_language_model(tmp_path, monkeypatch, capsys):
    output = tmp_path / "output"
    output.mkdir()
    prepare_python(output / "data")
    few = replaced(language_model.TRAINING, max_update="2", save_interval_updates="1")
    monkeypatch.setattr(language_model, "TRAINING", few)

    def all_but_the_corpus(words, *arguments):
        if "python_source" not in words:
            run_here(words, *arguments)

    monkeypatch.setattr(steps, "run_child", all_but_the_corpus)
    assert language_model.main(["--output", str(output)]) == 0
    result = json.loads((output / "result.json").read_text())
    printed = capsys.readouterr().out
    for name in language_model.RECURRENCES:
        figure = result["bits_per_character"][f"model, recurrence {name}"]
        # a model that has learned nothing
        assert 1 < figure < 8
        assert f"{figure:.4f}" in printed
    assert re.search(rf"\n\n{language_model.PROMPT}.*\n\npage: ", printed, re.DOTALL)
    assert "<html" in (output / "page.html").read_text(encoding="utf-8")


def test_all_steps_of_translation(tmp_path, monkeypatch, capfd):
    corpus = replaced(translation.CORPUS, train="300", valid="20", test="12")
    few = {"max_update": "2", "save_interval_updates": "1", "max_tokens": "600"}
    monkeypatch.setattr(translation, "CORPUS", corpus)
    monkeypatch.setattr(translation, "TRAINING", replaced(translation.TRAINING, **few))
    # worker processes take long to start
    monkeypatch.setattr(translation, "PREPARATION", [*translation.PREPARATION, "--workers", "1"])
    for module in (steps, evaluate_translation, _binarize):
        monkeypatch.setattr(module, "run_child", run_here)
    assert translation.main(["--output", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    scores = json.loads((tmp_path / "evaluation/scores.json").read_text())
    assert scores["sentences"] == 12
    sizes = json.loads((tmp_path / "data/preparation.json").read_text())["parts"]
    # hardly any pair is dropped because of its length
    assert sizes["train"]["kept"] > 290
    examples = re.findall(r"^source: .*\ntranslation: .*\nreference: .*$", printed, re.MULTILINE)
    assert len(examples) == 10
    # the same command again trains no further
    assert translation.main(["--output", str(tmp_path)]) == 0
    assert re.search(r"^2 updates, \d+ s of training", capfd.readouterr().out, re.MULTILINE)
