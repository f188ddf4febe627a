"""The campaign of faults: what passes, what it writes, and a case of each kind that must fail."""

import datetime
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts.check import _faults_inputs, _faults_leaks, _faults_pickles, faults
from scripts.check._faults_leaks import Held
from scripts.check._faults_materials import Materials, logged
from scripts.check._faults_numbers import check_state
from scripts.check._faults_programs import (
    Case,
    CaseFailedError,
    CaseSkippedError,
    Known,
    Outcome,
    check_refusal,
    tensors,
)
from scripts.check._faults_same import check_close

SENTENCE = "error: --lr is -1: it must be above 0\n"


def outcome(status, printed, seconds=1.0):
    return Outcome(status, printed, seconds)


def test_a_refusal_names_thing_value_and_remedy():
    check_refusal(outcome(1, SENTENCE), "--lr", "-1")
    check_refusal(outcome(2, "usage: …\nfairseq-train: " + SENTENCE), "--lr", "0|-1")


@pytest.mark.parametrize(
    ("ended", "parts", "problem"),
    [
        (outcome(0, SENTENCE), (), "exit status 0"),
        (outcome(-9, SENTENCE), (), "signal 9"),
        (outcome(None, SENTENCE), (), "it hung for 1 s"),
        (outcome(1, "Traceback (most recent call last)\n" + SENTENCE), (), "a traceback"),
        (outcome(1, "no such value\n"), (), "no line says what the error is"),
        (outcome(1, SENTENCE), ("--lr", "nan"), "it does not name nan"),
        (outcome(1, "error: --lr is 10: it is too much\n"), ("--lr", "0"), "it does not name 0"),
        (outcome(1, "error: [Errno 2] No such file: 'a'\n"), (), "does not say what to do"),
        (outcome(1, "error: --lr is wrong\n"), ("--lr",), "does not say what to do"),
    ],
)
def test_what_is_no_refusal_is_found(ended, parts, problem):
    with pytest.raises(CaseFailedError, match=problem):
        check_refusal(ended, *parts)


def fail(folder):
    (folder / "left").touch()
    raise CaseFailedError("it hung")


def skip(folder):
    raise CaseSkippedError("no such disk")


def fail_somewhere(folder):
    raise CaseFailedError(f"no {folder}/model: it hung")


def break_down(folder):
    raise RuntimeError("of the case itself")


RAN = [
    (Case("good", lambda folder: "12 MiB"), "passed", "12 MiB"),
    (Case("bad", fail), "failed", "it hung"),
    (Case("bad as ever", fail, Known("^it h", "Give less.")), "known", "it hung"),
    (Case("bad anew", fail, Known("a traceback", "Give less.")), "failed", "it hung"),
    (Case("elsewhere", skip), "skipped", "no such disk"),
    (Case("broken", break_down), "failed", "the case itself failed: RuntimeError: of the case"),
    (Case("as good", lambda folder: "12 MiB"), "passed", "12 MiB"),
    (Case("somewhere", fail_somewhere), "failed", "no model: it hung"),
]


@pytest.fixture
def campaign(tmp_path, monkeypatch):
    """Run the campaign with the cases of RAN, and return exit status, results and page."""

    def call(cases, *words):
        section = faults.Section("what is tried", lambda *given: iter(cases))
        monkeypatch.setattr(faults, "SECTIONS", {"kills": section})
        monkeypatch.setattr(faults, "prepare_to_fork", lambda: None)
        page = tmp_path / "page.md"
        page.write_text(f"# Page\n\n{faults.MARKS[0]}\nold\n{faults.MARKS[1]}\n\nEnd.\n")
        words = ["--only", "kills", "--output", tmp_path / "out", "--page", page, *words]
        status = faults.main(list(map(str, words)))
        results = json.loads((tmp_path / "out" / "results.json").read_text())
        return status, results["kills"], page.read_text()

    return call


def test_results_are_written_and_told(campaign, tmp_path, capsys):
    status, results, page = campaign([case for case, _, _ in RAN], "--seed", 7)
    assert status == 1
    assert "error: 4 cases failed: their folders are in" in capsys.readouterr().err
    assert [(x["case"], x["result"]) for x in results["cases"]] == [(c.name, r) for c, r, _ in RAN]
    for found, (_, _, told) in zip(results["cases"], RAN, strict=True):
        assert found["told"].startswith(told)
    assert {x["seed"] for x in results["cases"]} == {7}
    assert sorted(path.name for path in (tmp_path / "out" / "work" / "kills").iterdir()) == [
        "001",
        "002",
        "003",
        "005",
        "007",
    ]
    (row,) = [line for line in page.splitlines() if "what is tried (full, seed 7" in line]
    assert [cell.strip() for cell in row.split("|")[2:-2]] == ["8", "2", "5", "1"]
    assert "- bad as ever: it hung. Give less." in page
    assert "- 12 MiB: good; as good." in page
    assert page.startswith("# Page\n")
    assert page.endswith("\n\nEnd.\n")
    assert "old" not in page


def test_known_failures_do_not_fail_a_campaign(campaign):
    status, _, page = campaign([RAN[0][0], RAN[2][0]], "--quick")
    assert status == 0
    assert "what is tried (quick, seed 1" in page
    status, _, page = campaign([RAN[0][0]])
    assert status == 0
    assert "None of them failed." in page


def test_some_cases_are_tried_again(campaign, tmp_path):
    campaign([case for case, _, _ in RAN])
    path = tmp_path / "out" / "results.json"
    older = re.sub('"date": ".*?"', '"date": "2001-02-03"', path.read_text())
    path.write_text(older)
    mended = [Case("bad", lambda folder: None), Case("good", fail)]
    status, results, page = campaign(mended, "--cases", "^b.d$", "--seed", 7, "--quick")
    assert status == 1
    today = datetime.date.today().isoformat()
    found = {x["case"]: (x["result"], x["seed"], x["quick"], x["date"]) for x in results["cases"]}
    expected = {case.name: (result, 1, False, "2001-02-03") for case, result, _ in RAN}
    assert found == {**expected, "bad": ("passed", 7, True, today)}
    assert f"what is tried (full and quick, several seeds, {today})" in page


@pytest.mark.parametrize(
    ("expression", "problem"),
    [("^god$", "no case of kills has that in its name"), ("[", "give a regular expression")],
)
def test_an_expression_of_no_case_is_refused(campaign, expression, problem, capsys):
    campaign([RAN[0][0]])
    status, results, _ = campaign([RAN[0][0]], "--cases", expression)
    assert (status, len(results["cases"])) == (1, 1)
    printed = capsys.readouterr().err
    assert f"error: --cases is {expression!r}: " in printed
    assert problem in printed


@pytest.mark.parametrize("always", [True, False])
def test_a_known_case_that_passes_is_told(campaign, capsys, always):
    campaign([Case("bad as ever", lambda folder: None, Known("hung", "Give less.", always))])
    assert ("passes now: bad as ever" in capsys.readouterr().out) == always


def test_a_page_without_marks_is_refused(campaign, tmp_path, capsys):
    other = tmp_path / "other.md"
    other.write_text("none")
    assert campaign([RAN[0][0]], "--page", other)[0] == 1
    assert f"error: --page {other} lacks the marks" in capsys.readouterr().err
    assert other.read_text() == "none"
    assert campaign([RAN[0][0]], "--page", tmp_path / "none.md")[0] == 1
    assert "none.md is no file" in capsys.readouterr().err


def test_tensors_and_logs_are_found():
    state = {"model": {"a": torch.ones(1)}, "more": [0, (torch.zeros(2), None)]}
    assert sorted(tensors(state)) == ["/model/a", "/more/1/0"]
    line = 'x | INFO | {} | {{"{}num_updates": "3", "{}loss": "1.5", "{}wps": "9"}}\n'
    printed = line.format("train_inner", "", "", "") + line.format("valid", *["valid_"] * 3)
    assert logged(printed) == {
        ("train_inner", 3): {"num_updates": "3", "loss": "1.5"},
        ("valid", 3): {"valid_num_updates": "3", "valid_loss": "1.5"},
    }


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("a", [float("nan")], "is not finite"),
        ("x.span.value", [0.5, 1.2], "is not between 0 and 1"),
        ("x.kappa", [0.5, 0.4], "is not on the simplex"),
        ("x.alpha", [1.5, -0.5], "is not on the simplex"),
    ],
)
def test_numbers_out_of_bounds_are_found(tmp_path, name, value, problem):
    path = tmp_path / "checkpoint.pt"
    good = {"a": torch.ones(1), "x.span.value": torch.ones(2), "x.kappa": torch.full((4,), 0.25)}
    torch.save({"model": good}, path)
    check_state(path)
    torch.save({"model": {**good, name: torch.tensor(value)}}, path)
    with pytest.raises(CaseFailedError, match=problem):
        check_state(path)


def test_other_answers_are_found():
    check_close([1.0, 2.0], [1.0, 2.001], 0.01, "losses")
    for found in ([1.0, 2.1], [1.0], [1.0, float("nan")]):
        with pytest.raises(CaseFailedError, match="losses"):
            check_close(found, [1.0, 2.0], 0.01, "losses")


@pytest.mark.parametrize("name", _faults_pickles.CONSTRUCTIONS)
def test_what_is_hostile_would_run_where_checkpoints_are_executed(name, tmp_path, monkeypatch):
    path, mark = tmp_path / "checkpoint.pt", tmp_path / "mark"
    torch.save({"model": {"a": torch.ones(1)}, "extra_state": {}}, path)
    _faults_pickles.CONSTRUCTIONS[name](path, mark)
    (tmp_path / "side_effects.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nx = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "side_effects", raising=False)
    try:
        state = torch.load(path, weights_only=False)
        if callable(state.get("extra_state", {}).get("more")):
            state["extra_state"]["more"]()
    except Exception:
        # what it holds is no checkpoint; it has run before that shows
        assert mark.exists()
    assert mark.exists()


@pytest.mark.parametrize("section", ["inputs", "options", "numbers", "same"])
def test_cases_have_names_of_their_own_and_are_drawn_from_the_seed(section, tmp_path):
    def names(quick, seed=1):
        drawn = faults.SECTIONS[section].cases(Materials(tmp_path), quick, random.Random(seed))
        return [case.name for case in drawn]

    assert len(set(names(False))) == len(names(False))
    assert names(True) == names(True)
    assert names(True) != names(True, 2)
    assert set(names(True)) <= set(names(False))


@pytest.mark.parametrize(
    ("holds", "grows"),
    [
        (lambda look: Held(100, 5, 2), False),
        (lambda look: Held(100 + look % 20, 5, 2 + look % 2), False),
        (lambda look: Held(100 + look, 5, 2), True),
        (lambda look: Held(100, 5 + look // 30, 2), True),
        (lambda look: Held(100, 5, 2 + look // 30), True),
    ],
    ids=["flat", "comes and goes", "memory", "files", "threads"],
)
def test_what_grows_is_a_leak(holds, grows, tmp_path, monkeypatch):
    looks = iter(range(100))
    stand_in = SimpleNamespace(
        pid=1,
        ends_within=lambda seconds: next(looks, None) is None,
        wait=lambda limit: Outcome(0, "", 1.0),
    )
    monkeypatch.setattr(_faults_leaks, "Program", lambda *given, **options: stand_in)
    held = map(holds, range(100))
    monkeypatch.setattr(_faults_leaks, "held_by", lambda pid: next(held))
    if grows:
        with pytest.raises(CaseFailedError, match=r"^memory \d+ and then \d+ MiB, files"):
            _faults_leaks.watch(("a command",), tmp_path, 60)
    else:
        assert _faults_leaks.watch(("a command",), tmp_path, 60).startswith("memory 1")


def test_a_flipped_bit_is_one_bit():
    content = bytes(range(50))
    changed = _faults_inputs.flip(content, random.Random(1))
    different = [one ^ two for one, two in zip(content, changed, strict=True) if one != two]
    assert len(different) == 1
    assert different[0].bit_count() == 1


def test_the_page_of_results_has_its_marks():
    page = (Path(__file__).parents[3] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert all(page.count(mark) == 1 for mark in faults.MARKS)
