"""The quick cases: equivalent models agree, every model runs, and the command reports results.

The published code takes part if ORIGINALS names checkouts of it, separated by colons.
"""

import json
import logging
import math
import os
import re
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import cases, measure, plot, published
from benchmarks.cases import Selection
from benchmarks.measure import AUTOCAST, BF16, FP32, PUBLISHED, Case, Model, Row, Setting, Work

CPU = torch.device("cpu")
CHECKOUTS = [Path(path) for path in os.environ.get("ORIGINALS", "").split(os.pathsep) if path]
CASES = Selection([], True, CPU, 1, CHECKOUTS).cases()


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_models_compute_the_same_and_all_run(name):
    case = CASES[name]
    measure.largest_differences(case, CPU)
    for model, how in case.models.items():
        for dtype in how.dtypes:
            case.build(model, Setting(CPU, dtype)).turn()


@pytest.mark.slow
def test_memory_is_measured_in_a_separate_process(monkeypatch):
    chosen = Selection(["product_key_memory"], True, CPU, 1, [])
    case = next(iter(chosen.cases()))
    monkeypatch.setattr(Case, "build", Mock(side_effect=AssertionError("built in this process")))
    # how much a process holds at most depends on the machine, as when it swaps
    assert chosen.measure_memory(case, "ProductKeyMemory", FP32) >= 0


def test_memory_of_a_model_is_what_building_and_two_turns_add(monkeypatch, caplog):
    # restores the level of messages, which the function changes
    caplog.set_level(logging.WARNING)
    done = []
    case = products(done=done)
    monkeypatch.setattr(Selection, "cases", lambda *_, **options: {str(case): case})
    monkeypatch.setattr(cases, "peak_memory", lambda _: 10 + 25 * len(done))
    assert cases._added_memory(Selection([], True, CPU, 1, []), str(case), "ours", FP32) == 50
    assert done == [1, 1]


def test_the_command_prints_and_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Selection, "measure_memory", lambda *_: 3 << 20)
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
    assert row.keys() == {"model", "rival", "training", "evaluation"}
    assert (tmp_path / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    drawn = tmp_path / "again.png"
    assert plot.main([str(tmp_path / "benchmark.json"), "--output", str(drawn)]) == 0
    assert drawn.read_bytes() == (tmp_path / "benchmark.png").read_bytes()


def test_a_case_without_memory_for_it_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "measure", Mock(side_effect=torch.OutOfMemoryError("no room")))
    assert command.main(["kernels", "--quick", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("left out: no room") == 3


def test_impossible_options_are_refused(tmp_path, capsys):
    for words, message in (
        (["--turns", "0"], "--turns is 0: it must be at least 1"),
        (["--original", str(tmp_path)], f"--original is {tmp_path}: give checkouts of https://"),
    ):
        assert command.main(["--quick", *words]) == 1
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
    (tmp_path / "utils.py").touch()
    if refused:
        with pytest.raises(ValueError, match=f"--original is .*{re.escape(refused)}"):
            published.import_published([tmp_path])
    else:
        ((paper, model),) = published.import_published([tmp_path]).items()
        assert (paper, model.__name__) == ("all_attention", "TransformerSeq")
    assert "models" not in plot.sys.modules


def test_a_picture_shows_the_published_code_where_it_took_part():
    def row(case, model, times, dtype=FP32):
        return Row(case.paper, case.name, case.mode, model, dtype, 1, seconds=[1.0], times=times)

    training, evaluation = list(CASES.values())[:2]
    rows = [row(training, "transformer_xl", None), row(training, "transformer_lm", 0.8)]
    rows += [row(training, PUBLISHED, 2.123), row(training, PUBLISHED, 9.0, AUTOCAST)]
    assert plot.summarise([training, evaluation], rows) == []
    (shown,) = plot.summarise([training, evaluation], [*rows, row(evaluation, PUBLISHED, 4.0)])
    assert (shown["rival"], shown["training"], shown["evaluation"]) == (PUBLISHED, 2.12, 4.0)


def products(off=0.0, rows=1, agreement=1.0, done=None):
    """Return a case whose models multiply (8, 16) x (16, 32): ours once, the other twice."""

    def build(times, setting):
        def turn():
            if done is not None:
                done.append(times)
            for _ in range(times):
                torch.ones(8, 16) @ torch.ones(16, 32)

        outputs = torch.zeros(100, 3)
        outputs[:rows, 1] = off * (times - 1)
        return Work(turn, lambda: outputs)

    models = {"ours": Model(partial(build, 1))}
    models["twice"] = Model(partial(build, 2), same=True, dtypes=(FP32, BF16))
    return Case("paper", "a name", "a mode", 100, models, tolerance=0.1, min_agreement=agreement)


def measure_rows(case, monkeypatch, turns=3, dtypes=(FP32,)):
    """Measure a case on a machine with 1e9 multiply-adds per second; turn n takes n seconds."""
    seconds = iter(range(1, 100))
    monkeypatch.setattr(measure, "multiply_add_rate", lambda *_: 1e9)

    def time_turn(work):
        work()
        return float(next(seconds))

    monkeypatch.setattr(measure, "time_turn", time_turn)
    memory = {"ours": 5, "twice": 7}
    return measure.measure(case, dtypes, CPU, turns, lambda _, model, dtype: memory[model])


def test_models_take_turns_after_one_that_warms_up(monkeypatch):
    done = []
    ours, twice = measure_rows(products(done=done), monkeypatch)
    assert done == [1, 2] * 4
    assert (ours.seconds, twice.seconds) == ([1, 3, 5], [2, 4, 6])
    assert (ours.times, twice.times) == (None, pytest.approx(4 / 3))
    assert (ours.peak_bytes, twice.peak_bytes) == (5, 7)
    assert (ours.multiply_adds, twice.multiply_adds) == (8 * 16 * 32, 2 * 8 * 16 * 32)
    assert ours.rate_share == pytest.approx(8 * 16 * 32 / 1e9 / 3)
    assert ours.as_json()["tokens_per_second"] == pytest.approx(100 / 3)


def test_a_model_is_compared_with_ours_in_each_dtype(monkeypatch):
    rows = measure_rows(products(), monkeypatch, 1, (BF16, AUTOCAST, FP32))
    # turns take 1 to 5 seconds
    assert [(row.dtype, row.times) for row in rows if row.model == "twice"] == [
        (BF16, 2 / 1),
        (FP32, 5 / 4),
    ]


@pytest.mark.parametrize(
    ("off", "rows", "agreement", "refused"),
    [
        (0.05, 100, 1.0, False),
        (math.nan, 1, 1.0, True),
        # some of the rows may differ
        (-0.2, 1, 0.99, False),
        (-0.2, 2, 0.99, True),
    ],
)
def test_largest_differences_refuses_other_outputs(off, rows, agreement, refused):
    case = products(off, rows, agreement)
    if refused:
        message = "^paper: a name, a mode: twice differs from ours by .* 0.1 is allowed"
        with pytest.raises(ValueError, match=message):
            measure.largest_differences(case, CPU)
    else:
        assert set(measure.largest_differences(case, CPU)) == {"twice"}
