"""The benchmark of product-key memories: what it refuses, what it reports."""

import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

from scripts._shared import machine as benchmark_machine
from scripts.benchmark import _benchmark as shared
from scripts.benchmark import _memory_layers as layers_module
from scripts.benchmark import product_key_memory as benchmark
from scripts.benchmark._memory_layers import (
    FIXED,
    FIXED_SEARCHED,
    INFERENCE,
    MODELS,
    SEARCH,
    STEP,
    TRAINING_STEP,
    MemoryCase,
)
from scripts.benchmark._original import MEMORY
from scripts.benchmark._report import BF16, DTYPES, FP32, Entry
from scripts.benchmark.product_key_memory import MemoryMeasurement, MemoryReport
from tests.scripts.tables import cells

pytestmark = pytest.mark.usefixtures("small_memories")
OURS, DENSE, SPARSE, FEED_FORWARD, ORIGINAL, ORIGINAL_SPARSE = MODELS
BETTER, BETTER_ORIGINAL = "the better EmbeddingBag", "the better original"
PLAIN, PUBLISHED = (DENSE, SPARSE), (ORIGINAL, ORIGINAL_SPARSE)
CASE = MemoryCase(slots=64, heads=2, knn=4, tokens=6)
SMALL = "--slots 64 --heads 2 --knn 4 --tokens 6 --threads 1".split()


@pytest.fixture
def quick(monkeypatch):
    """Memory measured without another process."""
    memory = {"peak_bytes": 3 * 2**20, "largest_bytes": 2**10}
    monkeypatch.setattr(benchmark.MemoryBenchmark, "memory_of", lambda *_: memory)


def made(*words):
    return benchmark.MemoryBenchmark(benchmark.MemoryBenchmark.parse_options([*SMALL, *words]))


def test_the_ratio_is_to_the_better_of_the_plain_memories():
    seconds = {OURS: [2.0, 1.0, 4.0], DENSE: [10.0], SPARSE: [6.0], FEED_FORWARD: [1.0]}
    rows = [
        MemoryMeasurement("64", TRAINING_STEP, "2/4/6", model, FP32, 6, 0.5, 0, of_model)
        for model, of_model in seconds.items()
    ]
    report = MemoryReport(rows, MODELS, "slots")
    assert report.ratios(rows[0]) == pytest.approx(
        {f"times {BETTER}": 3, f"times {FEED_FORWARD}": 0.5}
    )
    assert report.ratios(rows[1]) == {f"times {BETTER}": None, f"times {FEED_FORWARD}": None}
    assert cells(report.table())[2][5:8] == ["2,000.00 (1,000.00 to 4,000.00)", "3", "500.00"]
    assert list(MemoryReport(rows[:2], MODELS, "slots").ratios(rows[0])) == [f"times {BETTER}"]
    assert MemoryReport(rows[:1], MODELS, "slots").ratios(rows[0]) == {}


def test_a_table_in_a_tensor_of_ours_is_warned_of():
    row = MemoryMeasurement("64", TRAINING_STEP, "2/4/6", OURS, FP32, 6, 0.5, 9, [1.0])
    row.table_bytes, row.largest_bytes = 100, 99
    report = MemoryReport([row], MODELS, "slots")
    assert report.warnings() == []
    row.largest_bytes = 100
    assert report.warnings() == [
        f"warning: a tensor of a training step of {OURS} is as large as the table, 64 slots, "
        "2/4/6, fp32"
    ]


def test_what_does_not_fit_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(layers_module, "WIDTH", 512)
    large = ["--slots", str(1024**2), "--heads", "4", "--knn", "32", "--tokens", "2048"]
    monkeypatch.setattr(benchmark, "free_memory", lambda _: 16 * 2**30)
    given = made(*large)
    assert [entry.model for entry in given.entries(given.cases[0])] == [OURS, SPARSE, FEED_FORWARD]
    assert given.left_out == [
        f"left out: {DENSE} with 1048576 slots, 4/32/2048, fp32: beside the others 19.5 GiB are "
        "needed, 16.0 GiB are free"
    ]
    monkeypatch.setattr(benchmark, "free_memory", lambda _: 5 * 2**30)
    message = "--slots is 1048576 (fp32): 6.0 GiB are needed, 5.0 GiB are free: give fewer slots"
    given = made(*large)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        given.entries(given.cases[0])
    given = made(*large, "--mode", "inference")
    assert len(given.entries(given.cases[0])) == 4
    assert 0 < benchmark_machine.free_memory(torch.device("cpu")) < 2**50


def test_a_memory_that_computes_something_else_is_refused(monkeypatch):
    given = made()
    assert given.largest_difference(CASE) <= benchmark.MemoryBenchmark.tolerance
    search = layers_module.PlainKeys.forward
    pattern = (
        rf"{DENSE}'s scores and outputs differ by [\d.e-]+ from {OURS}'s with the same weights "
        r"\(64 slots, 2/4/6; allowed is 1e-05\): speeds of models that compute different things "
        r"are not compared; see tests/scripts/benchmark/test_memory_layers\.py"
    )
    monkeypatch.setattr(
        layers_module.PlainKeys, "forward", lambda self, queries, k: search(self, 1.01 * queries, k)
    )
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        given.largest_difference(CASE)


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("self.query_mlps[0](x)", "self.query_mlps[0](x + 1e-3)"),
        ("scores.float().softmax(-1)", "scores.float().sigmoid()"),
        ("scores.flatten(2)", "scores.mT.flatten(2)"),
        ("per_sample_weights=weights", "per_sample_weights=torch.nan * weights"),
    ],
)
def test_an_original_that_computes_something_else_is_refused(memory_checkout, there, instead):
    file = memory_checkout / MEMORY.file
    text = file.read_text()
    assert there in text
    assert (
        made("--original", str(memory_checkout)).largest_difference(CASE)
        <= benchmark.MemoryBenchmark.tolerance
    )
    file.write_text(text.replace(there, instead))
    given = made("--original", str(memory_checkout))
    pattern = (
        f"^--original is {re.escape(str(memory_checkout))}, whose scores and outputs differ by "
        "[a-z0-9.-]+ from .* not compared; give an unchanged checkout$"
    )
    with pytest.raises(ValueError, match=pattern):
        given.largest_difference(CASE)


def test_an_original_is_imported_quietly(memory_checkout, capfd):
    made("--original", str(memory_checkout))
    assert capfd.readouterr().err == ""
    assert not any(name.startswith("xlm") for name in sys.modules)


def rows_of(text):
    """Cells of the rows of Markdown tables in a text, without titles."""
    return [row for row in cells(text) if row[0].isdecimal()]


def test_run(quick, tmp_path, capsys):
    words = ["--dtype", FP32, BF16, "--steps", "2", "--output", str(tmp_path)]
    assert benchmark.main([*SMALL, *words, "--slots", "64", "256"]) == 0
    printed = capsys.readouterr().out
    memories = [OURS, DENSE, SPARSE]
    real = [
        (part, model)
        for part in [*STEP, TRAINING_STEP, INFERENCE]
        for model in [*memories, FEED_FORWARD]
    ] + [(SEARCH, model) for model in memories]
    fixed = [(part, model) for part in (FIXED, FIXED_SEARCHED) for model in memories]
    assert [tuple(row[:5]) for row in rows_of(printed)] == [
        (str(slots), "2/4/6", part, model, dtype)
        for rows in (real, fixed)
        for slots in (64, 256)
        for dtype in (FP32, BF16)
        for part, model in rows
    ]
    for row in rows_of(printed):
        assert [bool(cell) for cell in row[9:]] == (
            [row[3] == OURS]
            # neither a search nor fixed rows are of a feed-forward sublayer
            + [row[3] == OURS and row[2] not in (SEARCH, FIXED, FIXED_SEARCHED)]
            * (row[2] not in (FIXED, FIXED_SEARCHED))
            + [row[2] == TRAINING_STEP] * 2
        )
    assert "64 slots, 2/4/6: scores and outputs differ by" in printed
    growth = rf"\nfixed rows, 2/4/6, {OURS} fp32: 256 slots take [\d.]+ times as long as 64\n"
    assert re.search(growth, printed)
    written = json.loads((tmp_path / "benchmark.json").read_text())
    rows = written["measurements"]
    assert len(rows) == 4 * 29
    assert all(len(row["seconds"]) == 2 for row in rows)
    assert written["left_out"] == []
    assert written["copied_bytes_per_second"] > 0
    assert list(written["multiply_adds_per_second"]) == [FP32, BF16]
    by_part = {(row["size"], row["dtype"], row["mode"], row["model"]): row for row in rows}
    step = by_part["64", FP32, TRAINING_STEP, OURS]
    of_parts = [by_part["64", FP32, part, OURS]["seconds"] for part in STEP]
    assert step["seconds"] == [sum(parts) for parts in zip(*of_parts, strict=True)]
    assert step["peak_bytes"] == 3 * 2**20
    assert step["largest_bytes"] == 2**10
    assert step["table_bytes"] == 64 * 16 * 4
    assert step[f"times {BETTER}"] > 0
    assert step["moved_bytes"] > by_part["64", BF16, TRAINING_STEP, OURS]["moved_bytes"]
    assert (tmp_path / "benchmark.png").exists()


def test_run_of_searches_alone(quick, capsys):
    assert benchmark.main([*SMALL, "--mode", "search", "--steps", "1"]) == 0
    assert [row[2:4] for row in rows_of(capsys.readouterr().out)] == [
        [SEARCH, model] for model in (OURS, DENSE, SPARSE)
    ]


def test_run_beside_the_original(quick, memory_checkout, tmp_path, capsys):
    words = ["--mode", "train", "search", "fixed-rows", "--steps", "1", "--output", str(tmp_path)]
    assert benchmark.main([*SMALL, *words, "--original", str(memory_checkout)]) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    searched = [OURS, *PLAIN, *PUBLISHED]
    assert [row[3] for row in rows if row[2] == TRAINING_STEP] == list(MODELS)
    assert [row[3] for row in rows if row[2] == SEARCH] == searched
    assert [row[3] for row in rows if row[2] == FIXED] == [OURS, *PLAIN]
    titles = [f"times {name}" for name in (BETTER, FEED_FORWARD, BETTER_ORIGINAL)]
    assert cells(printed)[0][9:12] == titles
    measured = json.loads((tmp_path / "benchmark.json").read_text())["measurements"]
    step = [row for row in measured if row["mode"] == TRAINING_STEP]
    rates = {row["model"]: row["tokens_per_second"] for row in step}
    better = max(rates[model] for model in PUBLISHED)
    assert step[0][f"times {BETTER_ORIGINAL}"] == pytest.approx(rates[OURS] / better)


@pytest.fixture
def other_process(monkeypatch):
    """Runs in this process what is to run in another, which would import for seconds."""

    def run(words, **_):
        assert words[:3] == [sys.executable, "-m", benchmark.__name__]
        out, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(errors):
            status = benchmark.main(words[3:])
        return subprocess.CompletedProcess(words, status, out.getvalue(), errors.getvalue())

    monkeypatch.setattr(shared.subprocess, "run", run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_measured_in_another_process(other_process, monkeypatch, dtype):
    peaks = iter([1000, 1300])
    monkeypatch.setattr(layers_module, "peak_memory", lambda _: next(peaks))
    case = CASE._replace(slots=1024)
    given = made("--slots", "1024", "--dtype", *DTYPES)
    measured = given.memory_of(0, Entry(DENSE, dtype))
    assert measured == {"peak_bytes": 300, "largest_bytes": case.table_bytes(dtype)}


def test_a_process_that_fails_is_reported(other_process, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(benchmark, "step_memory", fail)
    message = (
        f"the memory of {OURS} fp32 (64 slots, 2/4/6) cannot be measured, exit status 1, error: "
        "no memory: give smaller --slots: where memory is short give smaller --slots"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        made().memory_of(0, Entry(OURS, FP32))
