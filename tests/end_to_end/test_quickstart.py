"""The quickstart's own commands, run for real on a small corpus with two updates."""

import json
import re

import pytest

from scripts.prepare import _binarize, python_source
from scripts.quickstart import _steps as quickstart_steps
from scripts.quickstart import language_model as quickstart
from tests.end_to_end.commands import ROOT, forked


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

    # the same command again trains no further
    monkeypatch.setattr(quickstart_steps, "child_process", forked)
    monkeypatch.setattr(quickstart, "sample", lambda output: None)
    assert quickstart.main(["--output", str(output)]) == 0
    assert "2 of 2 updates done, nothing left to do" in capsys.readouterr().out
