"""The quick cases: what must compute the same does, every model runs, and the command says so.

The published code takes part where ORIGINALS names checkouts of it, with a colon between.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import plot, published
from benchmarks.cases import PAPERS, Selection, all_cases, quick_cases
from benchmarks.measure import AUTOCAST, FP32, PUBLISHED, Row, Setting, largest_differences

CPU = torch.device("cpu")
CHECKOUTS = [Path(path) for path in os.environ.get("ORIGINALS", "").split(os.pathsep) if path]
CASES = Selection([], True, CPU, 1, CHECKOUTS).cases()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_models_compute_the_same_and_all_of_them_run(name):
    case = CASES[name]
    largest_differences(case, CPU)
    for model, how in case.models.items():
        for dtype in how.dtypes:
            case.build(model, Setting(CPU, dtype)).turn()


def test_the_tables_have_every_paper():
    for cases in (all_cases(False, {}), all_cases(True, {}), quick_cases({})):
        assert tuple(dict.fromkeys(case.paper for case in cases)) == PAPERS
        # they are told apart by it
        assert len(set(map(str, cases))) == len(cases)


@pytest.mark.slow
def test_memory_is_that_of_a_separate_process():
    selection = Selection(["product_key_memory"], True, CPU, 1, [])
    table = 64**2 * 512 * 4
    of_training, of_inference = (
        selection.own_memory(case, "ProductKeyMemory", FP32) for case in selection.cases().values()
    )
    # values and two means
    assert of_training > 3 * table
    assert table < of_inference < of_training


def test_the_command_prints_and_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Selection, "own_memory", lambda *_: 3 << 20)
    words = ["product_key_memory", "--quick", "--turns", "2", "--threads", "1"]
    assert command.main([*words, "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for case in (name for name in CASES if name.startswith("product_key_memory")):
        assert f"\n{case}\n" in printed
    content = json.loads((tmp_path / "benchmark.json").read_text(encoding="utf-8"))
    assert len(content["rows"]) == printed.count(" fp32 |") >= 8
    for row in content["rows"]:
        assert (len(row["seconds"]), row["peak_bytes"]) == (2, 3 << 20)
        assert f"| {row['model']} " in printed
    (row,) = content["summary"]
    assert row["model"] == "product-key memory, 4k slots"
    assert row["training"] > 0
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    drawn = tmp_path / "again.png"
    assert plot.main([str(tmp_path / "benchmark.json"), "--output", str(drawn)]) == 0
    assert drawn.read_bytes() == (tmp_path / "benchmark.png").read_bytes()


def test_a_case_without_memory_for_it_is_left_out(tmp_path, monkeypatch, capsys):
    def full(*_):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(command, "measure", full)
    assert command.main(["kernels", "--quick", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("left out: no room") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--turns", "0"], "--turns is 0: it must be at least 1"),
        (["--original", "FOLDER"], "--original is FOLDER: give checkouts of https://github.com/"),
    ],
)
def test_impossible_options_are_refused(tmp_path, capsys, words, message):
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    assert command.main(["--quick", *words]) == 1
    message = message.replace("FOLDER", str(tmp_path))
    assert capsys.readouterr().err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("source", "refused"),
    [
        ("class TransformerSeq: pass", ""),
        ("class Another: pass", "whose models cannot be imported or has no TransformerSeq (Attr"),
        ("import nowhere", "(ModuleNotFoundError: No module named 'nowhere')"),
    ],
)
def test_a_checkout_is_imported_and_its_names_are_left_to_others(tmp_path, source, refused):
    (tmp_path / "models.py").write_text(f"import utils\n{source}\n")
    (tmp_path / "utils.py").write_text("")
    if refused:
        with pytest.raises(ValueError, match="--original is") as error:
            published.import_published([tmp_path])
        assert refused in str(error.value)
    else:
        (found,) = published.import_published([tmp_path]).items()
        assert (found[0], found[1].__name__) == ("all_attention", "TransformerSeq")
    assert "models" not in plot.sys.modules


def test_a_picture_shows_the_published_code_where_it_took_part():
    def row(case, model, times, dtype=FP32):
        return Row(case.paper, case.name, case.mode, model, dtype, 1, seconds=[1.0], times=times)

    training, evaluation = list(CASES.values())[:2]
    rows = [
        row(training, "transformer_xl", None),
        row(training, "transformer_lm", 0.8),
        row(training, PUBLISHED, 2.123),
        row(training, PUBLISHED, 9.0, AUTOCAST),
    ]
    assert plot.summarise([training, evaluation], rows) == []
    rows.append(row(evaluation, PUBLISHED, 4.0))
    figures = {"training": 2.12, "evaluation": 4.0}
    title = {"model": "Transformer-XL, 2 layers", "rival": PUBLISHED}
    assert plot.summarise([training, evaluation], rows) == [{**title, **figures}]
