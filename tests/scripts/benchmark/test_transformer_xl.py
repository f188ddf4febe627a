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
from scripts._shared.results import NO_MATPLOTLIB
from scripts.benchmark import _benchmark as shared
from scripts.benchmark import transformer_xl as benchmark
from scripts.benchmark._language_models import Case, draw_tokens
from scripts.benchmark._report import AUTOCAST, BF16, FP32, Entry
from scripts.benchmark.transformer_xl import MODELS, multiply_adds
from tests.operations import multiply_adds_of
from tests.scripts.tables import cells

OURS, PLAIN, ORIGINAL = MODELS
SIZE = "transformer_xl_tiny"
LAYERS, WIDTH, INNER, SYMBOLS = 4, 128, 512, 205
CPU = torch.device("cpu")
STAND_IN = Path(__file__).with_name("stand_in_transformer_xl.py").read_text(encoding="utf-8")


def exactly(text):
    return f"^{re.escape(text)}$"


def made(*words):
    words = ["--size", SIZE, "--train", "4/6/2", "--evaluate", "--threads", "1", *words]
    return benchmark.TransformerXLBenchmark(benchmark.TransformerXLBenchmark.parse_options(words))


def case_of(mode, *numbers, size=SIZE):
    return benchmark.parse_case(size, mode, "/".join(map(str, numbers)))


@pytest.fixture
def quick(monkeypatch):
    """Small products, and memory measured without another process."""
    monkeypatch.setattr(benchmark_machine, "PRODUCT_WIDTH", 64)
    peak = {"peak_bytes": 3 * 2**20}
    monkeypatch.setattr(benchmark.TransformerXLBenchmark, "memory_of", lambda *_: peak)


@pytest.fixture
def stub(tmp_path):
    """Writes a stand-in of the published code and returns its folder."""

    def write(text=STAND_IN):
        folder = tmp_path / "checkout" / "pytorch"
        folder.mkdir(parents=True)
        (folder / "mem_transformer.py").write_text(text)
        return folder.parent

    return write


def counted(reader, case, warm):
    """Multiply-adds that PyTorch counts in a segment after the memory is full."""
    generator = torch.Generator().manual_seed(1)
    segments = [draw_tokens(case, generator) for _ in range(warm + 1)]
    for tokens in segments[:-1]:
        reader.read(tokens)
    return multiply_adds_of(lambda: reader.read(segments[-1]))


@pytest.mark.parametrize(
    ("case", "superfluous"),
    [
        # a query's scores by distance have a column more than it sees keys, a table a row more
        (case_of("train", 5, 7, 2), 3 * 10 * WIDTH + 2 * WIDTH**2),
        (case_of("train", 5, 0, 2), 3 * 10 * WIDTH + 2 * WIDTH**2),
        (case_of("evaluate", 5, 7, 2), 10 * WIDTH),
        (case_of("evaluate", 5, 12, 2, 3), 10 * WIDTH),
    ],
)
def test_operations_are_those_that_pytorch_counts(monkeypatch, case, superfluous):
    monkeypatch.setattr(query_blocks, "QUERY_BLOCK", 1)  # no key is scored that is not seen
    (reader,) = made().readers(case, [Entry(OURS, FP32)])
    assert counted(reader, case, warm=4) == multiply_adds(case) + LAYERS * superfluous


def test_operations_of_a_plain_model_by_hand():
    pairs = 2 * (1 + 2 + 3)
    layer = 6 * (4 * WIDTH**2 + 2 * WIDTH * INNER) + 2 * pairs * WIDTH
    expected = LAYERS * layer + 6 * WIDTH * SYMBOLS
    assert multiply_adds(case_of("evaluate", 3, 9, 2, 4), plain=True) == expected
    assert multiply_adds(case_of("train", 3, 9, 2), plain=True) == 3 * expected


@pytest.mark.parametrize("factor", [1, 2])
def test_operations_of_adaptive_embeddings_by_hand(monkeypatch, factor):
    adaptive = {
        "adaptive_input": True,
        "adaptive_input_cutoff": "20,60",
        "adaptive_input_factor": factor,
    }
    monkeypatch.setitem(benchmark.PRESETS, "adaptive", {**benchmark.PRESETS[SIZE], **adaptive})
    of_layers = multiply_adds(case_of("evaluate", 3, 9, 1)) - 3 * WIDTH * SYMBOLS
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
    got = multiply_adds(case_of("evaluate", 3, 9, 1, size="adaptive"))
    assert got == pytest.approx(of_layers + expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "text", "case"),
    [
        ("train", "512/512/2", Case(SIZE, "train", 512, 512, 2, SYMBOLS)),
        ("train", "512/0/2", Case(SIZE, "train", 512, 0, 2, SYMBOLS)),
        ("evaluate", "80/2100/1/820", Case(SIZE, "evaluate", 80, 2100, 1, SYMBOLS, 820)),
    ],
)
def test_setting(mode, text, case):
    assert benchmark.parse_case(SIZE, mode, text) == case
    assert case.setting == text


def test_symbols_are_those_of_the_data_set():
    sizes = ["transformer_xl_wt103_base", "transformer_xl_text8_large", SIZE]
    assert [benchmark.symbols_of(size) for size in sizes] == [267_735, 27, SYMBOLS]


def test_a_repeat_renews_the_memory():
    assert case_of("evaluate", 80, 2100, 1).segments == 27
    assert case_of("train", 512, 512, 1).segments == case_of("train", 512, 0, 1).segments == 1


def test_entries(monkeypatch):
    # any class will do: no model is made of it
    monkeypatch.setattr(benchmark.TRANSFORMER_XL.__class__, "import_class", lambda *_: object)

    def chosen(*words):
        given = made(*words)
        return given.entries(given.cases[0])

    ours, plain = Entry(OURS, FP32), Entry(PLAIN, FP32)
    beside = ["--original", "."]
    assert chosen() == [ours, plain]
    assert chosen(*beside) == [ours, plain, (ORIGINAL, FP32)]
    assert chosen("--dtype", BF16, *beside)[2:] == [(ORIGINAL, FP32), (ORIGINAL, AUTOCAST)]
    adaptive = chosen("--size", "transformer_xl_wt103_base", "--dtype", AUTOCAST, *beside)
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

    monkeypatch.setattr(benchmark.TransformerXLBenchmark, "run", interrupted)
    assert benchmark.main([]) == 130
    assert capsys.readouterr().err == (
        "\ninterrupted; nothing was written; the same command starts anew\n"
    )


def test_where_nothing_can_be_written_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark.TransformerXLBenchmark, "run", lambda _: pytest.fail("measured"))
    (tmp_path / "file").touch()
    assert benchmark.main(["--output", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err == (
        f"error: --output {tmp_path}/file cannot be written (File exists): "
        "give a folder in a place where you may write\n"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert benchmark.main(["--output", str(tmp_path / "made")]) == 1
    assert capsys.readouterr().err == f"error: {NO_MATPLOTLIB}\n"
    assert not (tmp_path / "made").exists()


def test_what_is_given_counts_more_than_quick():
    options = benchmark.TransformerXLBenchmark.parse_options(["--quick", "--steps", "5"])
    assert (options.steps, options.train) == ("5", ["128/128/1"])
    assert benchmark.TransformerXLBenchmark.parse_options([]).train == ["512/512/2"]


def test_load_of_other_programs_is_told():
    assert benchmark_machine.load_warning(0.2) is None
    assert "the load average of the last minute is 1.6" in benchmark_machine.load_warning(1.61)


def test_hardware_line():
    line = benchmark_machine.hardware_line(CPU)
    assert f"{torch.get_num_threads()} threads, bf16 units: " in line
    assert f"PyTorch {torch.__version__}, 20" in line


def test_run_without_the_original(quick, tmp_path, capsys):
    words = f"--size {SIZE} --train 4/6/2 --evaluate 4/6/1/5 --steps 1 --dtype fp32 {AUTOCAST}"
    assert benchmark.main([*words.split(), "--output", str(tmp_path / "made")]) == 0
    printed = capsys.readouterr()
    assert "error" not in printed.err
    assert re.match(r"takes about \d+ min on 2 cores\n", printed.out)
    titles, _, *rows = cells(printed.out)
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
    assert f"{SIZE}, evaluate 4/9/2/5: losses of a token, in nats, differ by" in printed
    titles, _, *rows = cells(printed)
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
        f"error: --original is {re.escape(str(checkout))}, whose losses of a token, in nats, "
        r"differ by [\d.e-]+ from transformer_xl's with the same weights \(transformer_xl_tiny, "
        r"train 4/6/2; allowed is 0.0002\): speeds of models that compute different things are not "
        "compared; give an unchanged checkout\n"
    )
    assert re.fullmatch(pattern, printed.err)


def test_an_original_without_a_number_is_refused(quick, stub, capsys):
    checkout = stub(STAND_IN.replace("losses.view_as(target)", "losses.view_as(target) * math.nan"))
    words = f"--size {SIZE} --train 4/6/2 --evaluate --steps 1 --original {checkout}"
    assert benchmark.main(words.split()) == 1
    assert "differ by nan from" in capsys.readouterr().err


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
        made("--original", str(checkout))
    assert "mem_transformer" not in sys.modules


def test_memory_is_measured_in_another_process():
    peak = made().memory_of(0, Entry(OURS, FP32))["peak_bytes"]
    parameters = LAYERS * (5 * WIDTH**2 + 2 * WIDTH * INNER) + SYMBOLS * WIDTH
    # weights and gradients
    assert peak > 8 * parameters


def test_memory_that_cannot_be_measured_is_an_error(monkeypatch):
    ended = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nno room\n")
    monkeypatch.setattr(shared.subprocess, "run", lambda *_, **__: ended)
    message = (
        f"the memory of {OURS} {FP32} ({SIZE}, train 4/6/2) cannot be measured, exit status 1, no "
        "room: where memory is short give a smaller size, segment, memory or batch"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        made().memory_of(0, Entry(OURS, FP32))
