import io
import json
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

from scripts._shared import machine as benchmark_machine
from scripts.benchmark import _product_key_memory_baselines as entries
from scripts.benchmark import _product_key_memory_costs as memory_costs
from scripts.benchmark import product_key_memory as benchmark
from scripts.benchmark._baselines import AUTOCAST, BF16, DTYPES, FP32, Entry
from scripts.benchmark._product_key_memory_baselines import (
    FIXED,
    FIXED_SEARCHED,
    INFERENCE,
    MODELS,
    SEARCH,
    STEP,
    TRAINING_STEP,
    MemoryCase,
    build_layers,
    check_same_outputs,
    draw_fixed_slots,
    step_memory,
)
from scripts.benchmark._product_key_memory_costs import Cost, costs, state_bytes
from scripts.benchmark._product_key_memory_report import BETTER, MemoryMeasurement, MemoryReport
from tests.operations import multiply_adds_of

CPU = torch.device("cpu")
OURS, DENSE, SPARSE, FEED_FORWARD = MODELS
WIDTH, QUERY_WIDTH = 16, 8
SLOTS, HEADS, KNN, TOKENS = 64, 2, 4, 6
CASE = MemoryCase(SLOTS, HEADS, KNN, TOKENS)
SMALL = "--slots 64 --heads 2 --knn 4 --tokens 6 --threads 1".split()
# of a query network with biases and of two sets of 8 sub-keys of width 4, for 2 heads
WEIGHTS = 16 * 16 + 16 + 2 * 2 * 8 * 4


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small layers, products and copies."""
    monkeypatch.setattr(benchmark_machine, "PRODUCT_WIDTH", 64)
    monkeypatch.setattr(memory_costs, "COPIED_BYTES", 1 << 16)
    for module in (entries, memory_costs, benchmark):
        monkeypatch.setattr(module, "WIDTH", WIDTH)
        monkeypatch.setattr(module, "QUERY_WIDTH", QUERY_WIDTH)


@pytest.fixture
def quick(monkeypatch):
    """Memory measured without another process."""
    monkeypatch.setattr(benchmark.MemoryBenchmark, "memory_of", lambda *_: (3 * 2**20, 2**10))


def made(*words):
    return benchmark.MemoryBenchmark(benchmark.parse_options([*SMALL, *words]))


def layer_of(model, case=CASE, dtype=FP32):
    """A entry whose values no other one has."""
    (layer,) = build_layers(case, [Entry(model, dtype)], CPU)
    return layer


def values_of(layer):
    values = layer.module.values
    return values.weight if isinstance(values, torch.nn.Module) else values


def weights_of(layer):
    linear = layer.module.query_network
    linear = linear.layers[0] if layer.entry.model == OURS else linear[0]
    return [linear.weight, linear.bias, layer.module.keys.subkeys, values_of(layer)]


@pytest.mark.parametrize("model", [DENSE, SPARSE])
@pytest.mark.parametrize(
    "case", [CASE, MemoryCase(4, 1, 3, 1), MemoryCase(16, 3, 16, 2), MemoryCase(100, 1, 1, 5)]
)
def test_entries_compute_and_learn_the_same(case, model):
    ours, other = layer_of(OURS, case), layer_of(model, case)
    before = values_of(ours).detach().clone()
    assert torch.equal(before, values_of(other))
    slots = ours.search()[1]
    torch.testing.assert_close(ours.infer(), other.infer())
    for layer in (ours, other):
        layer.forward()
        torch.testing.assert_close(layer.output, ours.infer())
        layer.backward()
    torch.testing.assert_close(ours.x.grad, other.x.grad)
    gradients = [
        [w.grad.to_dense() if w.grad.is_sparse else w.grad for w in weights_of(layer)]
        for layer in (ours, other)
    ]
    torch.testing.assert_close(*gradients)
    for layer in (ours, other):
        layer.update()
        assert all(weight.grad is None for weight in [layer.x, *weights_of(layer)])
    for weight, same, grad in zip(weights_of(ours), weights_of(other), gradients[0], strict=True):
        # Adam makes whole steps of rounding errors, and torch adds epsilon in another place; what
        # has no gradient at all must not change in either
        sure = (grad.abs() > 1e-5) | (grad == 0)
        torch.testing.assert_close(weight[sure], same[sure], rtol=0, atol=2e-6)
    learned = (values_of(ours) != before).any(1)
    assert learned.nonzero().flatten().tolist() == slots.unique().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_are_compared_with_the_same_weights_and_tokens(dtype):
    layers = build_layers(CASE, [Entry(model, dtype) for model in MODELS], CPU)
    assert len({values_of(layer).data_ptr() for layer in layers[:3]}) == 1
    for layer in layers:
        assert torch.equal(layer.x, layers[0].x)
        assert torch.equal(layer.grad, layers[0].grad)
        assert layer.x.dtype == (torch.bfloat16 if dtype == BF16 else torch.float32)
        layer.step()
        assert layer.infer().dtype in (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("searched", [False, True])
def test_fixed_slots_are_those_that_are_read(monkeypatch, searched):
    monkeypatch.setattr(entries, "FIXED_ROWS", 12)
    slots = draw_fixed_slots(CASE, torch.Generator().manual_seed(3))
    rows, counts = slots.unique(return_counts=True)
    assert slots.shape == (TOKENS, HEADS, KNN)
    assert counts.tolist() == [4] * 12
    layers = [layer_of(model) for model in (OURS, DENSE, SPARSE)]
    before = values_of(layers[0]).detach().clone()
    outputs = []
    for layer in layers:
        layer.fix_slots(slots, searched)
        layer.forward()
        outputs.append(layer.output.detach())
        torch.testing.assert_close(outputs[-1], outputs[0])
        layer.backward()
        found_by = [weight.grad is not None for weight in layer.module.query_network.parameters()]
        assert found_by == [True] * 2 * searched
        layer.update()
        learned = (values_of(layer) != before).any(1)
        assert learned.nonzero().flatten().tolist() == rows.tolist()


def test_fixed_slots_end_at_the_table(monkeypatch):
    monkeypatch.setattr(entries, "FIXED_ROWS", 1000)
    slots = draw_fixed_slots(MemoryCase(16, 2, 4, 4), torch.Generator().manual_seed(3))
    assert slots.unique().tolist() == list(range(16))


def test_costs_of_a_memory_by_hand():
    number, rows = 4, 20
    activations, reads, values = 6 * 16 * number, 48, 20 * 16 * number
    search = Cost(activations + WEIGHTS * number + 48 * 12, 6 * 16 * 16 + 6 * 2 * 2 * 8 * 4)
    forward = Cost(search.moved + 48 * 12 + values + activations, search[1] + reads * 16)
    backward = Cost(
        3 * activations + 2 * reads * 12 + reads * 4 + 2 * values + 8 * rows + 2 * WEIGHTS * number,
        2 * (6 * 16 * 16 + 6 * 2 * 2 * 4 * 4) + 2 * reads * 16,
    )
    update = Cost(7 * values + 8 * rows + 7 * WEIGHTS * number)
    of_parts = costs(CASE, OURS, rows, FP32)
    assert CASE.parameters == WEIGHTS
    assert of_parts[SEARCH] == search
    assert [of_parts[part] for part in STEP] == [forward, backward, update]
    step = tuple(map(sum, zip(forward, backward, update, strict=True)))
    assert of_parts[TRAINING_STEP] == of_parts[FIXED_SEARCHED] == step
    assert of_parts[INFERENCE] == forward
    read = 48 * 12 + values + activations
    unread = activations + 48 * 12 + 2 * values + 48 * 4 + 8 * rows
    assert of_parts[FIXED] == (read + unread + 7 * values + 8 * rows, 3 * reads * 16)
    assert costs(CASE, DENSE, rows, AUTOCAST) == of_parts
    assert costs(CASE, SPARSE, rows, BF16)[SEARCH].moved == 6 * 16 * 2 + WEIGHTS * 2 + 48 * 10


def test_costs_of_a_feed_forward_sublayer_by_hand():
    weights = 2 * 16 * 64 + 64 + 16
    of_parts = costs(CASE, FEED_FORWARD, 20, FP32)
    assert of_parts[INFERENCE] == (4 * (2 * 6 * 16 + weights), 6 * 2 * 16 * 64)
    assert of_parts["backward"] == (4 * (3 * 6 * 16 + 2 * weights), 2 * 6 * 2 * 16 * 64)
    assert of_parts["update"] == (4 * 7 * weights, 0)


def test_operations_are_those_that_pytorch_counts():
    memory, feed_forward = layer_of(OURS), layer_of(FEED_FORWARD)
    assert multiply_adds_of(memory.search) == costs(CASE, OURS, 9, FP32)[SEARCH].multiply_adds
    of_parts = costs(CASE, FEED_FORWARD, 9, FP32)
    assert multiply_adds_of(feed_forward.infer) == of_parts[INFERENCE].multiply_adds
    assert multiply_adds_of(feed_forward.step) == of_parts[TRAINING_STEP].multiply_adds


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_dense_gradients_take_a_tensor_of_the_tables_size(dtype):
    case = MemoryCase(1024, HEADS, KNN, TOKENS)
    table = case.table_bytes(dtype)
    assert table == values_of(layer_of(OURS, case, dtype)).nbytes
    largest = {
        model: step_memory(case, Entry(model, dtype), CPU)[1] for model in (OURS, DENSE, SPARSE)
    }
    assert largest[OURS] < table
    assert largest[DENSE] == table
    # a gradient for each read
    assert largest[SPARSE] >= case.reads * WIDTH * (2 if dtype == BF16 else 4)


def test_the_ratio_is_to_the_better_of_the_plain_memories():
    seconds = {OURS: [2.0, 1.0, 4.0], DENSE: [10.0], SPARSE: [6.0], FEED_FORWARD: [1.0]}
    rows = [
        MemoryMeasurement("64", TRAINING_STEP, "2/4/6", model, FP32, 6, 0.5, 0, of_model)
        for model, of_model in seconds.items()
    ]
    report = MemoryReport(rows, MODELS, "slots")
    assert report.speed_ratio(rows[0], BETTER, None) == pytest.approx(3)
    assert report.speed_ratio(rows[0], FEED_FORWARD, None) == pytest.approx(0.5)
    assert report.speed_ratio(rows[1], BETTER, None) is None
    assert "| 2,000.00 (1,000.00 to 4,000.00) | 3 | 500.00 |" in report.table()
    assert MemoryReport(rows[:2], MODELS, "slots").rivals() == {f"times {BETTER}": (BETTER, None)}
    assert MemoryReport(rows[:1], MODELS, "slots").rivals() == {}


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


def test_state_by_hand():
    table = 64 * 16
    assert state_bytes(CASE, OURS, FP32) == 2 * 4 * table
    assert state_bytes(CASE, OURS, BF16) == 3 * 4 * table
    assert state_bytes(CASE, DENSE, FP32) == 4 * 4 * table
    assert state_bytes(CASE, SPARSE, BF16) == 2 * (2 * table + 3 * 48 * 16)
    assert state_bytes(CASE, FEED_FORWARD, FP32) == 0


def test_what_does_not_fit_is_left_out_with_the_reason(monkeypatch):
    case = MemoryCase(1024**2, 4, 32, 2048)
    for module in (memory_costs, entries):
        monkeypatch.setattr(module, "WIDTH", 512)
    given = made()
    monkeypatch.setattr(benchmark, "free_memory", lambda _: 16 * 2**30)
    admitted, reasons = given.admit(case, FP32)
    assert [entry.model for entry in admitted] == [OURS, SPARSE, FEED_FORWARD]
    assert reasons == [
        f"left out: {DENSE} with 1048576 slots, 4/32/2048, fp32: beside the others 19.5 GiB are "
        "needed, 16.0 GiB are free"
    ]
    monkeypatch.setattr(benchmark, "free_memory", lambda _: 5 * 2**30)
    message = "--slots is 1048576 (fp32): 6.0 GiB are needed, 5.0 GiB are free: give fewer slots"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        given.admit(case, FP32)
    assert len(made("--mode", "inference").admit(case, FP32)[0]) == 4
    assert 0 < memory_costs.free_memory(CPU) < 2**50


def test_a_memory_that_computes_something_else_is_refused(monkeypatch):
    assert check_same_outputs(CASE, CPU) <= entries.TOLERANCE
    search = entries.PlainKeys.forward
    pattern = (
        rf"--slots is 64 \(2/4/6\), with which {DENSE}'s scores differ by [\d.e-]+ and its outputs "
        rf"by [\d.e-]+ from {OURS}'s with the same weights \(allowed is 1e-05\), and [\d.]+% of "
        "the tokens read the same slots: speeds of layers that compute different things are not "
        r"compared; find the wrong one with tests/scripts/benchmark/test_product_key_memory\.py"
    )
    monkeypatch.setattr(
        entries.PlainKeys, "forward", lambda self, queries, k: search(self, 1.01 * queries, k)
    )
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        check_same_outputs(CASE, CPU)


def table(text):
    """Cells of the rows of Markdown tables in a text, without titles."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if row[0].isdecimal()]


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
    assert [tuple(row[:5]) for row in table(printed)] == [
        (str(slots), "2/4/6", part, model, dtype)
        for rows in (real, fixed)
        for slots in (64, 256)
        for dtype in (FP32, BF16)
        for part, model in rows
    ]
    for row in table(printed):
        assert [bool(cell) for cell in row[9:]] == (
            [row[3] == OURS]
            # neither a search nor fixed rows are of a feed-forward sublayer
            + [row[3] == OURS and row[2] not in (SEARCH, FIXED, FIXED_SEARCHED)]
            * (row[2] not in (FIXED, FIXED_SEARCHED))
            + [row[2] == TRAINING_STEP] * 2
        )
    assert "64 slots, 2/4/6: outputs differ by" in printed
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
    assert [row[2:4] for row in table(capsys.readouterr().out)] == [
        [SEARCH, model] for model in (OURS, DENSE, SPARSE)
    ]


@pytest.fixture
def other_process(monkeypatch):
    """Runs in this process what is to run in another, which would import for seconds."""

    def run(words, **_):
        assert words[:2] == [sys.executable, benchmark.__file__]
        out, errors = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(errors):
            status = benchmark.main(words[2:])
        return subprocess.CompletedProcess(words, status, out.getvalue(), errors.getvalue())

    monkeypatch.setattr(benchmark.subprocess, "run", run)


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_is_measured_in_another_process(other_process, monkeypatch, dtype):
    peaks = iter([1000, 1300])
    monkeypatch.setattr(entries, "peak_memory", lambda _: next(peaks))
    case = MemoryCase(1024, HEADS, KNN, TOKENS)
    measured = made().memory_of(case, Entry(DENSE, dtype))
    assert measured == (300, case.table_bytes(dtype))


def test_a_process_that_fails_is_reported(other_process, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(benchmark, "step_memory", fail)
    message = (
        f"the memory of {OURS} fp32 (64 slots, 2/4/6) cannot be measured, exit status 1, error: "
        "no memory: give smaller --slots: where memory is short give smaller --slots"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        made().memory_of(CASE, Entry(OURS, FP32))
