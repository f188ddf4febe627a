import json
import re
from pathlib import Path

import pytest
import torch

from fairseq_plugins.segment_language_model import attention_blocks as query_blocks
from scripts._shared import machine as benchmark_machine
from scripts.benchmark import all_attention as benchmark
from scripts.benchmark._language_models import MODES
from scripts.benchmark._report import AUTOCAST, BF16, FP32, Entry
from scripts.benchmark.all_attention import MODELS, SIZES, Size, case_of, multiply_adds
from tests.operations import multiply_adds_of
from tests.scripts.tables import cells

OURS, PLAIN, ORIGINAL = MODELS
STAND_IN = Path(__file__).with_name("stand_in_all_attention.py").read_text(encoding="utf-8")
LAYERS, WIDTH, HEADS, VECTORS, SPAN, SEGMENT, BATCH = 2, 16, 4, 6, 256, 5, 2
EVEN = Size(LAYERS, WIDTH, HEADS, VECTORS, SPAN, 0.1, SEGMENT, BATCH)
UNEVEN = Size(LAYERS, WIDTH, HEADS, VECTORS, SPAN, None, SEGMENT, BATCH)


def exactly(text):
    return f"^{re.escape(text)}$"


def made(*words):
    return benchmark.AllAttentionBenchmark(benchmark.AllAttentionBenchmark.parse_options(words))


@pytest.fixture
def quick(monkeypatch):
    """Small models and products, and memory measured without another process."""
    monkeypatch.setattr(benchmark_machine, "PRODUCT_WIDTH", 64)
    peak = {"peak_bytes": 3 * 2**20}
    monkeypatch.setattr(benchmark.AllAttentionBenchmark, "memory_of", lambda *_: peak)
    monkeypatch.setitem(SIZES, "tiny", EVEN)
    monkeypatch.setitem(SIZES, "uneven", UNEVEN)


@pytest.fixture
def stub(tmp_path):
    """Writes a stand-in of the published code and returns its folder."""

    def write(text=STAND_IN):
        folder = tmp_path / "checkout"
        folder.mkdir()
        (folder / "models.py").write_text(text)
        return folder

    return write


def test_every_head_sees_what_the_explanation_says():
    assert set(SIZES["small"].reaches().flatten().tolist()) == {442}
    assert set(SIZES["tiny"].reaches().flatten().tolist()) == {135}
    assert case_of("small", "train").setting == "512/442/1"
    explanation = " ".join(benchmark.EXPLANATION.split())
    assert "410 tokens, with the ramp 442" in explanation
    assert "span 103, with the ramp 135" in explanation


@pytest.mark.parametrize("size", [SIZES["uneven"], UNEVEN])
def test_one_head_of_each_uneven_layer_sees_everything(monkeypatch, size):
    tokens = size.span_values() * size.span
    assert torch.equal(size.span_values(), size.span_values())
    assert (tokens == size.span).sum(dim=1).tolist() == [1] * size.layers
    others = tokens[tokens < size.span]
    assert others.min() >= 16
    assert others.max() <= 200
    assert len(set(others.tolist())) > size.layers
    assert torch.equal(size.reaches(), (tokens + 32).long().clamp(max=size.span))
    monkeypatch.setitem(SIZES, "uneven", size)
    assert case_of("uneven", "evaluate").memory == size.span


def counted(name, model, mode):
    """Multiply-adds that PyTorch counts in a segment after the memory is full."""
    given = made("--case", name, "--mode", mode)
    (case,) = given.cases
    (reader,) = readers = given.readers(case, [Entry(model, FP32)])
    assert given.begin(case, readers) == 0
    first, second, tokens = given.draw(case, 3)
    reader.read(first)
    reader.read(second)
    return multiply_adds_of(lambda: reader.read(tokens))


@pytest.mark.parametrize("model", [OURS, PLAIN])
@pytest.mark.parametrize("mode", MODES)
def test_operations_are_those_that_pytorch_counts(quick, monkeypatch, mode, model):
    monkeypatch.setattr(query_blocks, "QUERY_BLOCK", 1)  # no key is scored that is not seen
    # a query's scores by distance have a column more than it sees keys
    superfluous = LAYERS * BATCH * SEGMENT * WIDTH * (3 if mode == "train" else 1)
    training = mode == "train"
    assert counted("tiny", model, mode) == multiply_adds(EVEN, training) + superfluous
    assert counted("uneven", model, mode) >= multiply_adds(UNEVEN, training) + superfluous


# 25.6 tokens and a ramp of 32
@pytest.mark.parametrize(("size", "seen"), [(EVEN, 2 * 4 * 58), (UNEVEN, UNEVEN.reaches().sum())])
def test_operations_by_hand(size, seen):
    projections = LAYERS * 10 * 4 * WIDTH**2
    persistent = LAYERS * 10 * 2 * VECTORS * WIDTH
    context = 10 * 3 * seen * 4
    output = 10 * WIDTH * 205
    forward = projections + persistent + context + output
    assert multiply_adds(size, training=False) == forward
    assert multiply_adds(size, training=True) == 3 * forward + 2 * 2 * BATCH * seen * 4 * WIDTH


def test_feed_forward_sublayers_have_as_many_parameters():
    given = made("--case", "tiny")
    ours, plain = (
        sum(parameter.numel() for parameter in reader.model.parameters())
        for reader in given.readers(given.cases[0], [Entry(OURS, FP32), Entry(PLAIN, FP32)])
    )
    # two biases and one more norm a layer
    assert plain - ours == 6 * (512 + 256 + 2 * 256)
    assert plain / ours < 1.005


def test_all_readers_begin_with_the_same_past(quick, stub):
    given = made("--case", "tiny", "--original", str(stub()))
    for case in given.cases:
        readers = given.readers(case, given.entries(case))
        given.begin(case, readers)
        ours, plain, original = readers
        assert case.memory == 58
        for reader in (ours, plain):
            memory, start = reader.memory
            assert start == 58
            states = memory.at(58).read(reader.model.model.decoder, original.memory[0])
            for state, cache in zip(states, original.memory, strict=True):
                assert state.hidden.shape == (BATCH, 58, WIDTH)
                assert torch.equal(state.hidden, cache[:, -58:])
                # what no head sees
                assert not cache[:, :-58].any()


def test_a_repeat_has_its_share_of_every_cost():
    train, evaluate = made("--case", "uneven").cases
    read = made().segments
    assert [read(train, model) for model in MODELS] == [1, 1, 1]
    assert [read(evaluate, model) for model in MODELS] == [16, 16, 1]


def test_an_original_without_the_class_is_refused(stub):
    checkout = stub("")
    message = (
        f"--original is {checkout}, whose models.py cannot be imported or has no TransformerSeq "
        "(AttributeError: module 'models' has no attribute 'TransformerSeq'): give an unchanged "
        "checkout"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        made("--original", str(checkout))


def test_run_without_the_original(quick, tmp_path, capsys):
    words = ["--case", "uneven", "--steps", "2", "--threads", "1", "--dtype", FP32, AUTOCAST]
    assert benchmark.main([*words, "--output", str(tmp_path)]) == 0
    titles, _, *rows = cells(capsys.readouterr().out)
    assert [titles[0], *titles[7:]] == ["case", f"times {PLAIN}", "peak memory, MiB"]
    assert [row[:5] for row in rows] == [
        ["uneven", mode, "5/256/2", model, dtype]
        for mode in MODES
        for dtype in (FP32, AUTOCAST)
        for model in (OURS, PLAIN)
    ]
    written = json.loads((tmp_path / "benchmark.json").read_text())
    # two streams of a segment of 5 tokens in training, of 52 segments in evaluation
    assert [row["tokens"] for row in written["measurements"]] == [10] * 4 + [520] * 4
    assert all(len(row["seconds"]) == 2 for row in written["measurements"])
    assert (tmp_path / "benchmark.png").exists()


def test_run_beside_the_original(quick, stub, capsys):
    words = f"--case tiny uneven --steps 1 --threads 1 --dtype {BF16} --original {stub()}"
    assert benchmark.main(words.split()) == 0
    printed = capsys.readouterr().out
    assert "uneven, train 5/256/2: losses of a token, in nats, differ by" in printed
    titles, _, *rows = cells(printed)
    assert titles[7:10] == [
        f"times {PLAIN}",
        "times original fp32",
        "times original bf16-autocast",
    ]
    assert [[*row[3:5], *map(bool, row[7:10])] for row in rows] == 4 * [
        [OURS, BF16, True, True, True],
        [PLAIN, BF16, False, False, False],
        [ORIGINAL, FP32, False, False, False],
        [ORIGINAL, AUTOCAST, False, False, False],
    ]


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("positions.flip(1)", "positions"),
        ("(distances - 1)", "distances"),
        ("+ z -", "+ 1.01 * z -"),
        ("weights = weights / weights.sum(-1, keepdim=True)", "pass"),
        ("memory.key) * of_head**0.5", "memory.key)"),
        ("log_softmax(-1)", "log_softmax(-1) * torch.nan"),
    ],
)
def test_an_original_that_computes_something_else_is_refused(quick, stub, there, instead):
    assert there in STAND_IN
    checkout = stub(STAND_IN.replace(there, instead))
    given = made("--case", "tiny", "--mode", "evaluate", "--original", str(checkout))
    pattern = (
        f"--original is {re.escape(str(checkout))}, whose losses of a token, in nats, differ by "
        r"[\d.e-]*(nan)? from all_attention_lm's with the same weights \(tiny, evaluate 5/58/2; "
        r"allowed is 0.0002\): speeds of models that compute different things are not compared; "
        "give an unchanged checkout"
    )
    with pytest.raises(ValueError, match=f"^{pattern}$"):
        given.largest_difference(given.cases[0])


def test_other_weights_are_refused(quick, stub, monkeypatch):
    copy_weights = benchmark.copy_all_attention

    def miscopy(original, decoder):
        copy_weights(original, decoder)
        decoder.layers[1].self_attn.persistent.values.data[0, 0] += 0.1

    monkeypatch.setattr(benchmark, "copy_all_attention", miscopy)
    given = made("--case", "uneven", "--mode", "train", "--original", str(stub()))
    with pytest.raises(ValueError, match="from all_attention_lm's with the same weights"):
        given.largest_difference(given.cases[0])


def test_memory_is_measured_in_another_process():
    given = made("--case", "tiny", "--mode", "evaluate", "--threads", "1")
    peak = given.memory_of(0, Entry(OURS, FP32))["peak_bytes"]
    parameters = 6 * (4 * 256**2 + 2 * 512 * 256) + 2 * 205 * 256 + 1024 * 32
    assert peak > 4 * parameters
