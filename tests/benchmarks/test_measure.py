"""How cases are measured, on stand-ins whose work is known."""

import math

import pytest
import torch

from benchmarks import machine, measure
from benchmarks.measure import AUTOCAST, BF16, FP32, PUBLISHED, Case, Entry, Machine, Work

CPU = torch.device("cpu")


class Products(Case):
    """Models that multiply matrices, (8, 16) x (16, 32); ours does so once, the other twice."""

    paper = "products"
    models = ("ours", "twice")
    same = ("twice", PUBLISHED)
    tolerance = 0.1

    def __init__(self, off=0.0, rows=1):
        super().__init__("a name", "a mode", tokens=100)
        self.off, self.rows, self.done = off, rows, []

    def build(self, entries, device, published):
        return [self._work(entry) for entry in entries]

    def _work(self, entry):
        def turn():
            self.done.append(entry)
            for _ in range(1 if entry.model == "ours" else 2):
                torch.ones(8, 16) @ torch.ones(16, 32)

        def outputs():
            found = torch.zeros(100, 3)
            if entry.model != "ours":
                found[: self.rows, 1] = self.off
            return found

        return Work(turn, outputs)


def rows_of(case, monkeypatch, turns=3, dtypes=(FP32,), published=()):
    """The rows of a case whose machine does a billion multiply-adds a second, and a turn 1 to 3."""
    seconds = iter(range(1, 100))
    monkeypatch.setattr(measure, "multiply_add_rate", lambda *_: 1e9)

    def seconds_of(work):
        work()
        return float(next(seconds))

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    memory = {"ours": 5, "twice": 7}.get
    return measure.measure(
        case, dtypes, dict.fromkeys(published), Machine(CPU), turns, lambda _, e: memory(e.model, 0)
    )


def test_models_take_turns_after_one_that_warms_up(monkeypatch):
    case = Products()
    ours, twice = rows_of(case, monkeypatch)
    assert [entry.model for entry in case.done] == ["ours", "twice"] * 4
    assert (ours.seconds, twice.seconds) == ([1, 3, 5], [2, 4, 6])
    assert (ours.median, twice.median) == (3, 4)
    assert (ours.times, twice.times) == (None, pytest.approx(4 / 3))
    assert (ours.peak_bytes, twice.peak_bytes) == (5, 7)
    assert (ours.multiply_adds, twice.multiply_adds) == (8 * 16 * 32, 2 * 8 * 16 * 32)
    assert ours.of_rate == pytest.approx(8 * 16 * 32 / 1e9 / 3)
    assert measure.as_json(ours)["tokens_per_second"] == pytest.approx(100 / 3)


def test_the_published_code_runs_in_fp32_and_beside_bf16_under_autocast():
    def entries(*dtypes):
        return Products().entries(dtypes, {"products": None})

    assert entries(FP32) == [Entry("ours", FP32), Entry("twice", FP32), Entry(PUBLISHED, FP32)]
    assert entries(BF16)[2:] == [Entry(PUBLISHED, FP32), Entry(PUBLISHED, AUTOCAST)]
    assert len(Products().entries([FP32, BF16], {})) == 4


def test_a_model_is_compared_with_ours_of_its_dtype(monkeypatch):
    rows = rows_of(Products(), monkeypatch, 1, (BF16, AUTOCAST), ["products"])
    times = {(row.model, row.dtype): row.times for row in rows}
    # their turns take 1 to 6 seconds
    assert times["twice", BF16] == 2 / 1
    assert times["twice", AUTOCAST] == pytest.approx(4 / 3)
    assert times[PUBLISHED, AUTOCAST] == 6 / 3
    assert times[PUBLISHED, FP32] is None


@pytest.mark.parametrize(
    ("off", "rows", "agreeing", "refused"),
    [
        (0.05, 100, 1.0, False),
        (-0.2, 1, 1.0, True),
        (math.nan, 1, 1.0, True),
        # a part of the rows may differ
        (0.2, 1, 0.99, False),
        (0.2, 2, 0.99, True),
    ],
)
def test_what_computes_other_things_is_not_compared(monkeypatch, off, rows, agreeing, refused):
    monkeypatch.setattr(Products, "agreeing", agreeing)
    case = Products(off, rows)
    if refused:
        message = "^products: a name, a mode: twice differs from ours by .* allowed is 0.1"
        with pytest.raises(ValueError, match=message):
            measure.largest_difference(case, {}, CPU)
    else:
        assert set(measure.largest_difference(case, {}, CPU)) == {"twice"}


@pytest.mark.parametrize("text", ["tpu", "cuda:99", "x"])
def test_a_device_that_is_not_there_is_refused(text):
    with pytest.raises(ValueError, match=f"^--device is '{text}'"):
        machine.parse_device(text)


def test_a_machine_that_is_not_idle_is_named():
    assert machine.load_warning(0.2) == ""
    assert "load average of the last minute is 3.0" in machine.load_warning(3.0)
