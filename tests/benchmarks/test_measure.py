"""How cases are measured, on stand-ins whose work is known."""

import math
from functools import partial

import pytest
import torch

from benchmarks import measure
from benchmarks.measure import AUTOCAST, BF16, FP32, Case, Model, Work

CPU = torch.device("cpu")


def products(off=0.0, rows=1, agreeing=1.0, done=None, other_dtypes=(FP32, BF16)):
    """A case whose models multiply (8, 16) x (16, 32); ours does so once, the other twice."""

    def build(times, setting):
        def turn():
            if done is not None:
                done.append(times)
            for _ in range(times):
                torch.ones(8, 16) @ torch.ones(16, 32)

        def outputs():
            found = torch.zeros(100, 3)
            if times == 2:
                found[:rows, 1] = off
            return found

        return Work(turn, outputs)

    models = {"ours": Model(partial(build, 1))}
    models["twice"] = Model(partial(build, 2), same=True, dtypes=other_dtypes)
    return Case("paper", "a name", "a mode", 100, models, tolerance=0.1, agreeing=agreeing)


def rows_of(case, monkeypatch, turns=3, dtypes=(FP32,)):
    """The rows of a case whose machine does a billion multiply-adds a second, and a turn 1 to 3."""
    seconds = iter(range(1, 100))
    monkeypatch.setattr(measure, "multiply_add_rate", lambda *_: 1e9)

    def seconds_of(work):
        work()
        return float(next(seconds))

    monkeypatch.setattr(measure, "seconds_of", seconds_of)
    memory = {"ours": 5, "twice": 7}
    return measure.measure(case, dtypes, CPU, turns, lambda _, model, dtype: memory[model])


def test_models_take_turns_after_one_that_warms_up(monkeypatch):
    done = []
    ours, twice = rows_of(products(done=done), monkeypatch)
    assert done == [1, 2] * 4
    assert (ours.seconds, twice.seconds) == ([1, 3, 5], [2, 4, 6])
    assert (ours.median, twice.median) == (3, 4)
    assert (ours.times, twice.times) == (None, pytest.approx(4 / 3))
    assert (ours.peak_bytes, twice.peak_bytes) == (5, 7)
    assert (ours.multiply_adds, twice.multiply_adds) == (8 * 16 * 32, 2 * 8 * 16 * 32)
    assert ours.of_rate == pytest.approx(8 * 16 * 32 / 1e9 / 3)
    assert ours.as_json()["tokens_per_second"] == pytest.approx(100 / 3)


def test_a_model_is_compared_with_ours_of_its_dtype_in_the_dtypes_that_it_runs_in(monkeypatch):
    rows = rows_of(products(), monkeypatch, 1, (BF16, AUTOCAST, FP32))
    times = {(row.model, row.dtype): row.times for row in rows}
    # turns take 1 to 5 seconds
    assert times == {
        **dict.fromkeys([("ours", BF16), ("ours", AUTOCAST), ("ours", FP32)]),
        ("twice", BF16): 2 / 1,
        ("twice", FP32): 5 / 4,
    }


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
def test_what_computes_other_things_is_not_compared(off, rows, agreeing, refused):
    case = products(off, rows, agreeing)
    if refused:
        message = "^paper: a name, a mode: twice differs from ours by .* 0.1 is allowed"
        with pytest.raises(ValueError, match=message):
            measure.largest_differences(case, CPU)
    else:
        assert set(measure.largest_differences(case, CPU)) == {"twice"}
