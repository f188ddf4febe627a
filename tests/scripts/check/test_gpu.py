"""The check of a GPU on a CPU: the tiny models go through it, and it tells what went wrong."""

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import fairseq
import numpy as np
import pytest
import torch
from fairseq.trainer import Trainer

import fairseq_plugins
from scripts._shared import machine
from scripts.check import _gpu_kernels, _gpu_report, _gpu_watch, gpu
from scripts.check._gpu_models import FP32, PLAIN, SYMBOLS, TINY, draw_text
from scripts.check._gpu_models import MODELS as CHECKED
from scripts.check._gpu_training import Place, Trial
from scripts.check._gpu_watch import Updates, counted_waits, watched
from tests import fork_server  # noqa: F401 (what processes are forked from)

CPU = torch.device("cpu")
STAND_IN = Path(__file__).parents[1] / "benchmark" / "stand_in_transformer_xl.py"
PLACE = Place(CPU, Path(), Path(), {})
MODELS = ["transformer_xl", "all_attention_lm", "pkm_transformer_lm", "weighted_transformer"]


def run(output, *words):
    """Be the command on a CPU; return its exit status and what it wrote as JSON."""
    status = gpu.main(["--device", "cpu", "--output", str(output), *map(str, words)])
    return status, json.loads((output / "gpu.json").read_text(encoding="utf-8"))


def test_all_tiny_models_go_through_it(tmp_path):
    status, content = run(tmp_path, "--only", "tiny", "fp32", "--minutes", 60)
    rows = {row["name"]: row for row in content["rows"]}
    assert status == 0
    assert list(rows) == [
        *(f"{model} tiny on the CPU" for model in MODELS),
        *(f"{model} tiny fp32" for model in MODELS),
    ]
    assert {row["state"] for row in rows.values()} == {"ok"}
    for model in MODELS:
        row = rows[f"{model} tiny fp32"]
        # it has learned something
        assert row["losses"][-1] < row["losses"][0] - 0.05
        assert row["losses"] == rows[f"{model} tiny on the CPU"]["losses"]
        exact = ("difference", "resumed_first_difference", "resumed_difference", "overflows")
        assert [row[name] for name in exact] == [0, 0, 0, 0]
        assert row["generated"] == row["generated_alike"] >= 10 * 16
        for part in ("training", "evaluation"):
            assert row[part]["tokens_per_second"] > 0
            assert row[part]["peak_bytes"] > 2**20
    report = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "8 rows in" in report
    assert "minutes: 8 ok." in report
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("gpu.json", "gpu.md", "gpu.png", "gpu.log")
    }


def find_one(place):
    return [lambda: {"losses": [1.0]}]


def find_fail_find(place):
    def fail():
        raise RuntimeError("CUDA error:\nout of luck")

    return [lambda: {"difference": 0.0}, fail, lambda: {"evaluated_difference": 0.0}]


def fail_first(place):
    return [lambda: 1 // 0, lambda: {"evaluated_difference": 0.0}]


def die(place):
    return [lambda: os.kill(os.getpid(), signal.SIGKILL)]


def end_quietly(place):
    return [lambda: {"losses": [1.0]}, lambda: sys.exit(0)]


def stay(place):
    """A process that has told all and does not end."""
    threading.Thread(target=time.sleep, args=(600,)).start()
    return [lambda: {"losses": [1.0]}]


def hang(place):
    return [lambda: time.sleep(600)]


@pytest.fixture
def rows(monkeypatch):
    """Has the command compute the given rows, in next to no time."""

    def have(*steps):
        made = [gpu.Row(work.__name__, work, size=str(n)) for n, work in enumerate(steps)]
        monkeypatch.setattr(gpu, "rows_of", lambda *_: made)
        monkeypatch.setattr(gpu, "write_data", lambda *_: None)

    return have


def test_a_row_that_fails_says_why_and_the_next_goes_on(tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "TO_END", 3)
    rows(find_fail_find, fail_first, die, end_quietly, stay, find_one)
    status, content = run(tmp_path)
    failed, untrained, died, quiet, stayed, found = content["rows"]
    assert failed["why"] == ["fail: RuntimeError: out of luck"]
    assert failed["evaluated_difference"] == 0
    # there is nothing to go on from
    assert untrained["why"] == ["<lambda>: ZeroDivisionError: integer division or modulo by zero"]
    assert "evaluated_difference" not in untrained
    early = "the process ended with exit status {} before its last step was done"
    assert died["why"] == [early.format(-signal.SIGKILL)]
    assert quiet["why"] == [early.format(0)]
    assert stayed["why"] == ["the process did not end 3 s after its last step"]
    assert [row["state"] for row in content["rows"]] == [*["failed"] * 5, "ok"]
    assert found["losses"] == [1.0]
    assert status == 1
    printed = capsys.readouterr()
    assert "3/6 die: failed; the process ended" in printed.out
    assert printed.err.startswith("error: 5 of 6 rows failed or are wrong: ")
    assert "Traceback" in (tmp_path / "gpu.log").read_text(encoding="utf-8")


def test_it_ends_in_time_with_what_it_has(tmp_path, rows, monkeypatch):
    tell = gpu.Check._tell

    def tell_and_hurry(check, *told):
        tell(check, *told)
        if len(check.content["rows"]) == 1:
            check.deadline = time.monotonic() + 2

    monkeypatch.setattr(gpu.Check, "_tell", tell_and_hurry)
    # a row begins as long as there is any time
    monkeypatch.setattr(gpu, "EXPECTED", 0)
    rows(find_one, hang, find_one)
    status, content = run(tmp_path)
    found, stopped, late = content["rows"]
    assert (found["state"], found["losses"]) == ("ok", [1.0])
    assert (stopped["state"], stopped["why"]) == ("not reached", ["stopped: the time was over"])
    assert (late["state"], late["why"]) == ("not reached", [])
    assert status == 0
    assert "Not reached: find_one." in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_it_ends_in_time_where_imports_take_longer(tmp_path, rows, monkeypatch, capsys):
    over, imported = threading.Event(), []

    def start(check, work):
        over.wait(20)
        imported.append(work)
        return SimpleNamespace(join=lambda: None)

    monkeypatch.setattr(gpu.Check, "_start", start)
    monkeypatch.setattr(gpu, "FOR_REPORT", 59)
    rows(find_one)
    status, content = run(tmp_path, "--minutes", 1)
    assert imported == []
    over.set()
    assert status == 1
    assert [row["state"] for row in content["rows"]] == ["not reached"]
    assert "error: no row came to its end in time: give more --minutes" in capsys.readouterr().err


def test_a_check_that_reaches_nothing_is_an_error(tmp_path, rows, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "EXPECTED", 10_000)
    rows(find_one)
    assert run(tmp_path)[0] == 1
    assert "error: no row came to its end in time: give more --minutes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "0.5"], "--minutes is 0.5: it must be at least 1"),
        (["--only", "tiny", "fp8"], "--only is 'tiny fp8': no row's name has all of these words"),
        (["--original", "nowhere"], "--original is nowhere: give folders of checkouts of https"),
        (["--device", "cuda"], "--device is 'cuda' and PyTorch sees 0 GPUs: give one of those"),
    ],
)
def test_it_refuses(words, message, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    refused(gpu.main, ["--device", "cpu", *words], message)


def test_every_size_of_a_model_is_in_a_row():
    rows = [row for row in gpu.rows_of("cpu", []) if row.size]
    trained = [(row.steps.args[0], row.steps.args[1]) for row in rows]
    for model in (*CHECKED, *PLAIN.values()):
        assert all((model, size) in trained for size in model.archs)


def test_a_gpu_has_more_rows_than_a_cpu():
    found = [("transformer_xl", Path("somewhere"))]
    on_gpu, on_cpu = ({row.name for row in gpu.rows_of(of, found)} for of in ("cuda", "cpu"))
    assert len(on_gpu) == len(gpu.rows_of("cuda", found))
    assert {name.split()[-1] for name in on_gpu - on_cpu} == {"amp"}
    assert on_cpu < on_gpu
    assert "transformer_xl beside published code" in on_cpu


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ({"difference": 0.0049}, []),
        ({"difference": 0.0051}, ["difference: 0.0051, allowed is 0.005"]),
        ({"resumed_difference": math.nan}, ["resumed difference: nan, allowed is 0.005"]),
        ({"difference": 0.06, "precision": "bf16"}, []),
        ({"resumed_difference": 0.06, "precision": "bf16"}, []),
        ({"resumed_first_difference": 0.006, "precision": "bf16"}, []),
        ({"resumed_first_difference": 0.06, "precision": "bf16"}, "resumed first difference: 0.06"),
        ({"evaluated_difference": 0.02, "precision": "fp16"}, "evaluated difference: 0.02, "),
        ({"fast": {"milliseconds": 1.0, "difference": 2e-4}}, "fast: 0.0002, allowed is 0.0001"),
        ({"training": {"tokens_per_second": 1.0}}, []),
        ({"generated": 160, "generated_alike": 144}, []),
        ({"generated": 160, "generated_alike": 143}, "143 of 160 words are the CPU's, at least 90"),
        ({"generated": 160, "generated_alike": 0, "precision": "bf16"}, []),
        ({"waits": {"fairseq/trainer.py:12 train_step": 3.0}}, []),
        ({"waits": {"fairseq_plugins/all_attention/adaptive_span.py:9 read_head_groups": 1}}, []),
        (
            {"waits": {"fairseq_plugins/all_attention/adaptive_span.py:9 forward": 0.25}},
            "the host waits at fairseq_plugins/all_attention/adaptive_span.py:9 forward",
        ),
        (
            {"waits": {"fairseq_plugins/all_attention/model.py:9 read_head_groups": 1.0}},
            "the host waits at fairseq_plugins/all_attention/model.py:9 read_head_groups",
        ),
    ],
)
def test_figures_are_judged_by_their_precision(found, wrong):
    judged = _gpu_report.judge({"precision": FP32, **found})
    assert len(judged) == bool(wrong)
    assert "".join(judged).startswith("".join(wrong))


def test_the_report_tells_of_all_that_was_found():
    row = {"precision": FP32, "size": TINY, "state": "ok", "why": [], "seconds": 1.0}
    speed = {"tokens_per_second": 1234.0, "peak_bytes": 5 * 2**20}
    waits = {"model.py:12 forward": 1.5}
    kernel = {"milliseconds": 3.25, "peak_bytes": 2**20, "difference": 1e-6}
    published = {"size": "base", "mode": "train", "setting": "8/8/1", "model": "original"}
    resumed = {"resumed_first_difference": 0.002, "resumed_difference": 0.003}
    rows = [
        {**row, "name": "a", "training": speed, "waits": waits, "difference": 0.001, **resumed},
        {**row, "name": "b", "waits": waits},
        {**row, "name": "c", "state": "failed", "why": ["train: too large"]},
        {**row, "name": "d", "fast": kernel},
        {**row, "name": "e", "published": [{**published, "dtype": FP32, **speed}]},
    ]
    content = {"device": "cuda", "hardware": "a GPU", "seconds": 90.0, "rows": rows}
    told = "\n".join(
        " ".join(line.split()) for line in "\n".join(_gpu_report.texts(content)).split("\n")
    )
    for line in (
        "5 rows in 1.5 minutes: 4 ok, 1 failed.",
        "| c | failed | train: too large |",
        "| a | ok | 0.001 | 0.002 | 0.003 | | 1,234 | 5 | | | 1.5 | | |",
        "| model.py:12 forward | 1.5 | a, b |",
        "| d | fast | 3.25 | 1e-06 | 1 |",
        "| e | base | train | 8/8/1 | original | fp32 | 1,234 | 5 |",
    ):
        assert line in told


def test_updates_that_are_missing_are_an_error():
    updates = Updates(CPU, 2, [torch.tensor(6.0)], [2.0], [2], [0.1], steps=2)
    assert updates.overflows() == 1
    with pytest.raises(ValueError, match=r"^1 of 2 updates were made$"):
        updates.losses()
    updates.number = 1
    assert updates.losses() == [3.0]


@pytest.mark.parametrize("overflows", [1, 4, 6])
@pytest.mark.parametrize("again", [False, True], ids=["left out", "tried again"])
def test_steps_that_overflow_are_not_timed(overflows, again, monkeypatch):
    updates, now = 12, [0.0]
    ends = [*[False] * overflows, *[True] * updates]
    monkeypatch.setattr(_gpu_watch, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def step(trainer, samples, raise_oom=False):
        if not ends.pop(0):
            now[0] += 100
            # fairseq's amp tries the same batch once more, in the same step
            return Trainer.train_step(trainer, samples) if again else None
        # each update is as long as it has tokens
        tokens = updates - len(ends)
        now[0] += tokens
        Trainer._reduce_and_log_stats(trainer, [{"loss": 1.0, "ntokens": tokens}], 1.0, 0.5)
        return None

    monkeypatch.setattr(Trainer, "train_step", step)
    monkeypatch.setattr(Trainer, "_reduce_and_log_stats", lambda *_: None)
    with watched(CPU, updates) as seen:
        while ends:
            Trainer.train_step(None, [])
    assert (seen.overflows(), len(seen.losses()), len(seen.seconds)) == (overflows, 12, 12)
    assert seen.seconds == seen.tokens
    assert seen.speed() == 1


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (Path(fairseq.__file__).with_name("trainer.py"), "fairseq/trainer.py:2 ask"),
        (
            Path(fairseq_plugins.__file__).parent / "all_attention" / "adaptive_span.py",
            "fairseq_plugins/all_attention/adaptive_span.py:2 ask",
        ),
    ],
)
def test_waits_are_counted_by_the_line_that_asks(file, told, monkeypatch):
    # there is no such mode without a GPU
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    waits, module = Counter(), {"warnings": warnings}
    source = "def ask():\n warnings.warn('called a synchronizing CUDA operation', stacklevel=1)"
    exec(compile(source, file, "exec"), module)
    with counted_waits(waits):
        for _ in range(2):
            module["ask"]()
        warnings.warn("something else", stacklevel=1)
    assert waits == {told: 2}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_kernels_agree_and_one_that_does_not_would_be_found(precision):
    def doubled(*arguments, **options):
        attended, lse = _gpu_kernels.plain_attention(*arguments, **options)
        return 2 * attended, lse

    kernels = {**_gpu_kernels.KERNELS, "doubled": doubled}
    found = {"precision": precision}
    for step in _gpu_kernels.compare_kernels(kernels, precision, PLACE):
        found.update(step())
    (wrong,) = _gpu_report.judge(found)
    assert wrong.startswith("doubled: 1, allowed is ")
    assert list(found)[1:] == ["fast", "plain", "dense bias", "doubled"]


def test_kernels_whose_gradients_are_no_numbers_are_wrong():
    def broken(query, keys, values, *rest, **options):
        for x in (keys := keys * 1, values := values * 1):
            x.register_hook(lambda grad: grad * math.nan)
        return _gpu_kernels.plain_attention(query, keys, values, *rest, **options)

    (step,) = _gpu_kernels.compare_kernels({"broken": broken}, FP32, PLACE)
    assert _gpu_report.judge({"precision": FP32, **step()}) == ["broken: nan, allowed is 0.0001"]


def test_losses_that_are_no_numbers_are_wrong():
    place = Place(CPU, Path(), Path(), {"transformer_xl tiny": [1.0, 1.0, 1.0]})
    trial = Trial(CHECKED[0], TINY, FP32, place, losses=[1.0, math.nan, 1.0])
    found = {"precision": FP32, **trial.compare()}
    assert _gpu_report.judge(found) == ["difference: nan, allowed is 0.005"]


def test_published_code_is_measured_beside_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "PRODUCT_WIDTH", 64)
    (tmp_path / "pytorch").mkdir()
    shutil.copy(STAND_IN, tmp_path / "pytorch" / "mem_transformer.py")
    ((name, path),) = _gpu_kernels.find_published([tmp_path])
    (step,) = _gpu_kernels.beside_published(name, path, PLACE)
    found = step()
    assert max(found["differences"].values()) < 2e-4
    assert {(row["model"], row["mode"]) for row in found["published"]} == {
        (model, mode)
        for model in ("transformer_xl", "transformer_lm", "original")
        for mode in ("train", "evaluate")
    }
    assert all(row["tokens_per_second"] > 0 for row in found["published"])


def test_most_of_the_text_follows_from_the_token_before():
    text = draw_text(1000, SYMBOLS, np.random.default_rng(1))
    following = np.mean((text[1:] - text[:-1]) % (SYMBOLS - 4) == 1)
    assert 0.6 < following < 0.8
    assert 4 <= text.min() <= text.max() < SYMBOLS
