import json
import shlex
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts.evaluate import translation as evaluate_translation
from scripts.plot import branch_weights as plot_branch_weights
from scripts.prepare import number_names
from scripts.quickstart import _steps as quickstart_steps
from scripts.quickstart import translation as quickstart

PARTS = {
    "train": {"pairs": 60000, "kept": 59990},
    "valid": {"pairs": 500, "kept": 499},
    "test": {"pairs": 1000, "kept": 1000},
}
SCORES = {"detokenized": {"score": 96.54}, "exact": 93.21, "sentences": 1000}


@pytest.fixture
def ran(monkeypatch):
    """Commands that the driver would have run."""
    commands = []

    @contextmanager
    def pretend(words, log=None, append=False):
        commands.append(words)
        if log:
            log.touch()
        yield SimpleNamespace(poll=lambda: 0)

    for module in (quickstart, quickstart_steps):
        monkeypatch.setattr(module, "child_process", pretend)
    monkeypatch.setattr(quickstart, "run_logged", lambda words, *_: commands.append(words))
    return commands


@pytest.fixture
def done(tmp_path, monkeypatch):
    """A working folder as it is when all commands have ended."""
    for folder in ("checkpoints", "data", "evaluation"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "preparation.json").write_text(json.dumps({"parts": PARTS}))
    (tmp_path / "evaluation" / "scores.json").write_text(json.dumps(SCORES))
    monkeypatch.setattr(quickstart_steps.Training, "progress", lambda self: (1300, 170.04))
    return tmp_path


def commands_printed(printed):
    """Words of the commands in what the driver printed."""
    paragraphs = printed.replace("\\\n", "").split("\n$ ")[1:]
    return [shlex.split(paragraph.split("\n")[0]) for paragraph in paragraphs]


def test_the_steps_run_the_commands_that_they_print(done, ran, capsys):
    assert quickstart.main(["--output", str(done)]) == 0
    printed = capsys.readouterr().out
    assert commands_printed(printed)[:4] == ran
    assert [Path(words[0]).name for words in ran] == ["python", "python", "fairseq-train", "python"]
    titles = [line.split(":")[0] for line in printed.split("\n") if line.startswith("[")]
    assert titles == [
        "[1] corpus",
        "[2] preparation",
        "[3] training",
        "[4] evaluation",
        "[5] what to try next",
    ]
    # each reads what the one before it wrote
    names, prepare, train, evaluate = ran
    assert quickstart_steps.option(names, "--output") == f"{done}/corpus"
    assert quickstart_steps.option(prepare, "--train") == f"{done}/corpus/train"
    assert quickstart_steps.option(prepare, "--output") == f"{done}/data"
    assert train[1] == evaluate[3] == f"{done}/data/bin"
    folder = quickstart_steps.option(train, "--save-dir")
    assert quickstart_steps.option(evaluate, "--path") == f"{folder}/checkpoint_last.pt"


def test_pairs_that_are_kept_are_printed(done, ran, capsys):
    quickstart.prepare(done)
    printed = capsys.readouterr().out
    assert "train 59,990 of 60,000 pairs kept\nvalid 499 of 500 pairs kept\n" in printed


def test_the_result_is_printed_and_written(done, ran, capsys):
    quickstart.evaluate(done)
    printed = capsys.readouterr().out
    assert "1300 updates, 170 s of training: BLEU 96.54, 93.2 % exact; written to" in printed
    result = json.loads((done / "result.json").read_text())
    assert (result["bleu"], result["exact"], result["sentences"]) == (96.54, 93.21, 1000)
    assert (result["updates"], result["training_seconds"]) == (1300, 170.0)
    assert result["pairs"] == {"train": 59990, "valid": 499, "test": 1000}
    assert result["training_options"] == quickstart.training(done).options


def test_branches_are_frozen_for_the_last_part_of_training():
    options = quickstart.TRAINING_OPTIONS
    frozen = int(quickstart_steps.option(options, "--freeze-branch-weights-after"))
    assert 0.7 < frozen / int(quickstart_steps.option(options, "--max-update")) < 1


def test_what_is_suggested_is_understood_by_its_scripts(tmp_path, capsys, monkeypatch):
    quickstart.suggest(tmp_path)
    another, plot, uniform = commands_printed(capsys.readouterr().out)
    assert another[:3] == ["echo", quickstart.SENTENCE, "|"]
    assert Path(another[3]).name == "fairseq-interactive"
    assert (
        uniform[1:]
        == quickstart.evaluation_command(tmp_path, "uniform", "--branch-weights", "uniform")[1:]
    )
    assert evaluate_translation.parse(uniform[3:]).branch_weights == "uniform"
    found = []
    monkeypatch.setattr(plot_branch_weights, "plot_branch_weights", found.append)
    assert plot_branch_weights.main(plot[3:]) == 0
    assert found[0].log == quickstart.training(tmp_path).log


def test_the_sentence_to_try_could_be_one_of_the_test_part():
    small, large = 39, 45692
    patterns = [english for english, _ in number_names.SENTENCES]
    names = {"small": number_names.name(small, "en"), "large": number_names.name(large, "en")}
    assert quickstart.SENTENCE in [pattern.format(**names) for pattern in patterns]
    seed = int(quickstart_steps.option(quickstart.CORPUS_OPTIONS, "--seed"))
    assert {number_names.part_of(number, seed) for number in (small, large)} == {"test"}
