import argparse
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fairseq_plugins.segment_language_model import attention_blocks as query_blocks
from scripts._shared import machine as benchmark_machine
from scripts.benchmark import _comparison as benchmark_comparison
from scripts.benchmark import _report as benchmark_report
from scripts.benchmark import _transformer_xl_baselines as entries
from scripts.benchmark import transformer_xl as benchmark
from scripts.benchmark._baselines import AUTOCAST, BF16, FP32, Case, Entry, Setting, draw_tokens
from scripts.benchmark._transformer_xl_baselines import (
    MODELS,
    build_readers,
    configuration,
    multiply_adds,
    vocabulary,
)
from tests.operations import multiply_adds_of

OURS, PLAIN, ORIGINAL = MODELS
SIZE = "transformer_xl_tiny"
LAYERS, WIDTH, INNER, SYMBOLS = 4, 128, 512, 205
CPU = torch.device("cpu")
STAND_IN = Path(__file__).with_name("stand_in_transformer_xl.py").read_text(encoding="utf-8")


def exactly(text):
    return f"^{re.escape(text)}$"


def options(**given):
    values = {
        "size": [SIZE],
        "dtype": [FP32],
        "train": ["4/6/2"],
        "evaluate": [],
        "steps": "1",
        "threads": "1",
        "device": "cpu",
        "original": None,
    }
    return argparse.Namespace(**{**values, **given})


@pytest.fixture
def quick(monkeypatch):
    """Small products, and memory measured without another process."""
    monkeypatch.setattr(benchmark_machine, "PRODUCT_WIDTH", 64)
    monkeypatch.setattr(benchmark.TransformerXLBenchmark, "peak_of", lambda *_: 3 * 2**20)


@pytest.fixture
def stub(tmp_path):
    """Writes a stand-in of the published code and returns its folder."""

    def write(text=STAND_IN):
        folder = tmp_path / "checkout" / "pytorch"
        folder.mkdir(parents=True)
        (folder / "mem_transformer.py").write_text(text)
        return folder.parent

    return write


def counted(reader, setting, warm):
    """Multiply-adds that PyTorch counts in a segment after the memory is full."""
    generator = torch.Generator().manual_seed(1)
    segments = [draw_tokens(vocabulary(SIZE), setting, generator) for _ in range(warm + 1)]
    for tokens in segments[:-1]:
        reader.read(tokens)
    return multiply_adds_of(lambda: reader.read(segments[-1]))


@pytest.mark.parametrize(
    ("setting", "superfluous"),
    [
        # a query's scores by distance have a column more than it sees keys, a table a row more
        (Setting("train", 5, 7, 2), 3 * 10 * WIDTH + 2 * WIDTH**2),
        (Setting("train", 5, 0, 2), 3 * 10 * WIDTH + 2 * WIDTH**2),
        (Setting("evaluate", 5, 7, 2), 10 * WIDTH),
        (Setting("evaluate", 5, 12, 2, 3), 10 * WIDTH),
    ],
)
def test_operations_are_those_that_pytorch_counts(monkeypatch, setting, superfluous):
    for block in ("QUERY_BLOCK", "QUERY_BLOCK_FUSED"):
        monkeypatch.setattr(query_blocks, block, 1)  # no key is scored that is not seen
    (reader,) = build_readers(SIZE, setting, [Entry(OURS, FP32)], CPU)
    expected = multiply_adds(configuration(SIZE, setting), vocabulary(SIZE), setting)
    assert counted(reader, setting, warm=4) == expected + LAYERS * superfluous


def test_operations_of_a_plain_model_by_hand():
    setting = Setting("evaluate", 3, 9, 2, 4)
    cfg = configuration(SIZE, setting)
    pairs = 2 * (1 + 2 + 3)
    layer = 6 * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 2 * pairs * WIDTH
    expected = LAYERS * layer + 6 * WIDTH * SYMBOLS
    assert multiply_adds(cfg, vocabulary(SIZE), setting, plain=True) == expected
    training = Setting("train", 3, 9, 2)
    cfg = configuration(SIZE, training)
    assert multiply_adds(cfg, vocabulary(SIZE), training, plain=True) == 3 * expected


@pytest.mark.parametrize("factor", [1, 2])
def test_operations_of_adaptive_embeddings_by_hand(monkeypatch, factor):
    adaptive = {
        "adaptive_input": True,
        "adaptive_input_cutoff": "20,60",
        "adaptive_input_factor": factor,
    }
    setting = Setting("evaluate", 3, 9, 1)
    whole = multiply_adds(configuration(SIZE, setting), vocabulary(SIZE), setting)
    monkeypatch.setitem(entries.PRESETS, "adaptive", {**entries.PRESETS[SIZE], **adaptive})
    cfg = configuration("adaptive", setting)
    of_layers = whole - 3 * WIDTH * SYMBOLS
    shares = [
        3 * math.log(end / start) / math.log(205 / 4)
        for start, end in [(4, 20), (20, 60), (60, 205)]
    ]
    expected = 3 * WIDTH * 22 + sum(
        share * WIDTH / factor**band * size
        for band, (share, size) in enumerate(zip(shares, (0, 40, 145), strict=True))
    )
    if factor == 2:
        read = [share * WIDTH * WIDTH / 2**band for band, share in enumerate(shares)]
        expected += sum(read) + 3 * WIDTH**2 + sum(read[1:])
    got = multiply_adds(cfg, vocabulary(SIZE), setting)
    assert got == pytest.approx(of_layers + expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "text", "setting"),
    [
        ("train", "512/512/2", Setting("train", 512, 512, 2)),
        ("train", "512/0/2", Setting("train", 512, 0, 2)),
        ("evaluate", "80/2100/1/820", Setting("evaluate", 80, 2100, 1, 820)),
    ],
)
def test_setting(mode, text, setting):
    assert benchmark.parse_setting(mode, text) == setting
    assert setting.text == text


def test_a_repeat_renews_the_memory():
    assert Setting("evaluate", 80, 2100, 1).segments == 27
    assert Setting("train", 512, 512, 1).segments == Setting("train", 512, 0, 1).segments == 1


def test_entries(monkeypatch):
    # any class will do: no model is made of it
    monkeypatch.setattr(benchmark, "import_original", lambda _: torch.nn.Module)

    def chosen(size, dtypes, original):
        made = benchmark.TransformerXLBenchmark(
            options(size=[size], dtype=dtypes, original=original)
        )
        return made.entries(made.cases[0])

    ours, plain = Entry(OURS, FP32), Entry(PLAIN, FP32)
    assert chosen(SIZE, [FP32], None) == [ours, plain]
    assert chosen(SIZE, [FP32], Path()) == [ours, plain, (ORIGINAL, FP32)]
    assert chosen(SIZE, [BF16], Path())[2:] == [(ORIGINAL, FP32), (ORIGINAL, AUTOCAST)]
    adaptive = chosen("transformer_xl_wt103_base", [AUTOCAST], Path())
    assert adaptive == [(OURS, AUTOCAST), (ORIGINAL, FP32)]


def test_sizes_without_a_memory_are_refused(capsys):
    assert benchmark.main(["--size", "transformer_xl_ptb"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(
        "error: --size is 'transformer_xl_ptb': give presets with a memory, "
        "transformer_xl_enwik8_base, "
    )


def test_interruption_is_one_line(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark_comparison, "run", interrupted)
    assert benchmark.main([]) == 130
    assert capsys.readouterr().out == (
        "\ninterrupted, nothing was written; the same command starts anew\n"
    )


def test_chart_without_matplotlib_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark_report.importlib.util, "find_spec", lambda _: None)
    message = (
        f"--output {tmp_path} gets a chart, for which matplotlib is missing: install it, "
        "`python -m pip install matplotlib`, or leave --output out"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        benchmark_report.check_output(tmp_path)


def test_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    message = (
        f"--output {tmp_path}/file cannot be written (File exists): "
        "give a folder in a place where you may write"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        benchmark_report.check_output(tmp_path / "file")


def test_load_of_other_programs_is_told():
    assert benchmark_machine.load_warning(0.2) is None
    assert "the load average of the last minute is 1.6" in benchmark_machine.load_warning(1.61)


def test_hardware_line():
    line = benchmark_machine.hardware_line(CPU)
    assert f"{torch.get_num_threads()} threads, bf16 units: " in line
    assert f"PyTorch {torch.__version__}, 20" in line


def table(text):
    """Cells of the rows of a Markdown table in a text, titles first."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return cells[:1] + cells[2:]


def test_run_without_the_original(quick, tmp_path, capsys):
    words = f"--size {SIZE} --train 4/6/2 --evaluate 4/6/1/5 --steps 1 --dtype fp32 {AUTOCAST}"
    assert benchmark.main([*words.split(), "--output", str(tmp_path / "made")]) == 0
    printed = capsys.readouterr()
    assert "error" not in printed.err
    titles, *rows = table(printed.out)
    assert titles == [
        "size",
        "mode",
        "setting",
        "model",
        "dtype",
        "tokens/s (lowest to highest)",
        "% of peak",
        "times transformer_lm",
        "peak memory, MiB",
    ]
    assert [row[1:5] for row in rows] == [
        [mode, setting, model, dtype]
        for mode, setting in [("train", "4/6/2"), ("evaluate", "4/6/1/5")]
        for dtype in (FP32, AUTOCAST)
        for model in (OURS, PLAIN)
    ]
    assert [bool(row[7]) for row in rows] == [True, False] * 4
    assert {row[-1] for row in rows} == {"3"}

    written = json.loads((tmp_path / "made" / "benchmark.json").read_text())
    assert list(written["multiply_adds_per_second"]) == [FP32, BF16]
    assert [row["tokens"] for row in written["measurements"]] == [16] * 4 + [8] * 4
    assert all(len(row["seconds"]) == 1 for row in written["measurements"])
    assert (tmp_path / "made" / "benchmark.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (tmp_path / "made").iterdir()) == [
        "benchmark.json",
        "benchmark.png",
    ]


def test_run_beside_the_original(quick, stub, capsys):
    words = f"--size {SIZE} --train 4/6/2 --evaluate 4/9/2/5 --steps 1 --dtype fp32 bf16"
    checkout = stub()
    assert benchmark.main([*words.split(), "--original", str(checkout)]) == 0
    printed = capsys.readouterr().out
    assert f"{SIZE}, evaluate 4/9/2/5: losses of a token differ from the original's by" in printed
    titles, *rows = table(printed)
    assert titles[7:10] == [
        "times transformer_lm",
        "times original fp32",
        "times original bf16-autocast",
    ]
    assert [[*row[3:5], *map(bool, row[7:10])] for row in rows[:6]] == [
        [OURS, FP32, True, True, False],
        [PLAIN, FP32, False, False, False],
        [OURS, BF16, True, True, True],
        [PLAIN, BF16, False, False, False],
        [ORIGINAL, FP32, False, False, False],
        [ORIGINAL, AUTOCAST, False, False, False],
    ]


def test_an_original_that_computes_something_else_is_refused(quick, stub, capsys):
    checkout = stub(STAND_IN.replace("q + biases[1]", "q - biases[1]"))
    words = f"--size {SIZE} --train 4/6/2 --evaluate --steps 1 --original {checkout}"
    assert benchmark.main(words.split()) == 1
    printed = capsys.readouterr()
    assert "|" not in printed.out
    pattern = (
        f"error: --original is {re.escape(str(checkout))}, whose loss of a token differs by "
        r"[\d.e-]+ nats from transformer_xl's with the same weights \(transformer_xl_tiny, train "
        r"4/6/2, fp32; allowed is 0.0002\): speeds of models that compute different things are not "
        "compared; give an unchanged checkout\n"
    )
    assert re.fullmatch(pattern, printed.err)


def test_an_original_without_a_number_is_refused(quick, stub, capsys):
    checkout = stub(STAND_IN.replace("losses.view_as(target)", "losses.view_as(target) * math.nan"))
    words = f"--size {SIZE} --train 4/6/2 --evaluate --steps 1 --original {checkout}"
    assert benchmark.main(words.split()) == 1
    assert "differs by nan nats" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("", "AttributeError: module 'mem_transformer' has no attribute 'MemTransformerLM'"),
    ],
)
def test_an_original_that_cannot_be_imported_is_refused(stub, text, reason):
    checkout = stub(text)
    message = (
        f"--original is {checkout}, whose mem_transformer.py cannot be imported or has no "
        f"MemTransformerLM ({reason}): give an unchanged checkout"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        benchmark.TransformerXLBenchmark(options(original=checkout))
    assert "mem_transformer" not in sys.modules


def test_memory_is_measured_in_another_process():
    made = benchmark.TransformerXLBenchmark(options())
    peak = made.peak_of(Case(SIZE, Setting("train", 4, 6, 2)), Entry(OURS, FP32))
    parameters = LAYERS * (5 * WIDTH**2 + 2 * WIDTH * INNER) + SYMBOLS * WIDTH
    # weights and gradients
    assert peak > 8 * parameters


def test_memory_that_cannot_be_measured_is_an_error(monkeypatch):
    ended = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nno room\n")
    monkeypatch.setattr(benchmark_comparison.subprocess, "run", lambda *_, **__: ended)
    message = (
        f"the memory of {OURS} {FP32} ({SIZE}, train 4/6/2) cannot be measured, exit status 1, no "
        "room: where memory is short give a smaller size, segment, memory or batch"
    )
    made = benchmark.TransformerXLBenchmark(options())
    with pytest.raises(ValueError, match=exactly(message)):
        made.peak_of(Case(SIZE, Setting("train", 4, 6, 2)), Entry(OURS, FP32))
