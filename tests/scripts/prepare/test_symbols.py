"""Moses tokens, units of byte pair encoding, limits on pairs, and processes that work on lines."""

import random
import sys

import numpy as np
import pytest
from fairseq.data.indexed_dataset import MMapIndexedDataset
from subword_nmt.apply_bpe import BPE

from scripts.prepare import _binarize, _clean, _lines, _symbols
from tests.scripts.prepare.prepared import contents

ODD = [
    "a\u0301e \u00fcber \U0001f600\U0001f600 \ud55c\uad6d\uc5b4 x\u00a0y \u2028 a@@b </w> lo</w>w",
    "",
    "l lo low lower lowest \u4f60\u597d &amp;amp; <unk> \u200d\u200d",
]


def draw_lines(alphabet):
    draw = random.Random(1)
    words = ["".join(draw.choices(alphabet, k=draw.randint(1, 9))) for _ in range(200)]
    return [" ".join(draw.choices(words, k=draw.randint(0, 9))) for _ in range(100)]


@pytest.mark.parametrize("fast", [True, False])
def test_subword_units_with_a_small_cache_equal_those_of_subword_nmt(tmp_path, monkeypatch, fast):
    if fast:
        pytest.importorskip("fastBPE", reason="fastBPE is not installed")
    else:
        monkeypatch.setitem(sys.modules, "fastBPE", None)
    monkeypatch.setattr(_symbols, "REMEMBERED", 3)
    text, codes = tmp_path / "text", tmp_path / "codes"
    lines = [*draw_lines("aab\u00e9\u4e2d<&;/w>\U0001f600"), *ODD]
    text.write_text("\n".join([*lines, ""]), encoding="utf-8")
    _symbols.learn_codes([text], 500, codes)
    units, encoder = _symbols.subword_units(codes), BPE(codes.open(encoding="utf-8"))
    for chunk in (lines, ODD, lines):
        assert units(chunk) == [encoder.process_line(line) for line in chunk]


def test_two_processes_write_the_same_files_as_one(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 20)
    (tmp_path / "text").write_text("\n".join(draw_lines("aab\u00e9<&;")), encoding="utf-8")
    options = ("--input", tmp_path / "text", "--unit", "subwords", "--bpe-size", 60)
    options += ("--moses", "en", "--held-out", 20)
    for workers in (1, 2):
        output = tmp_path / str(workers)
        assert prepare("text", *options, "--workers", workers, "--output", output)[0] == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


def same_lines():
    return list


def test_in_processes_reads_only_a_little_ahead(monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 2)
    begun = []
    lines = (begun.append(number) or f"{number} x" for number in range(100))
    results = _lines.in_processes(lines, 2, same_lines)
    assert next(results) == ["0 x", "1 x"]
    assert len(begun) <= 2 * 2 * _lines.AHEAD
    results.close()


@pytest.mark.filterwarnings("ignore:overflow")
def test_rewrite_index_mends_offsets_beyond_two_gibibytes(tmp_path):
    def offsets():
        index = MMapIndexedDataset.Index(str(tmp_path / "train.idx"))
        return [int(index[item][0]) for item in range(len(index))]

    # offsets as fairseq-preprocess writes them with several workers
    with MMapIndexedDataset.Index.writer(str(tmp_path / "train.idx"), np.uint32) as index:
        index.write([np.int32(2**28)] * 4)
    (tmp_path / "train.bin").write_bytes(bytes(4))
    assert min(offsets()) < 0
    _binarize.rewrite_index(str(tmp_path / "train"))
    assert offsets() == [0, 2**30, 2**31, 3 * 2**30]


def test_codes_are_learned_on_all_texts(tmp_path):
    one, other, both = (tmp_path / name for name in ("one", "other", "both"))
    one.write_text("low lower lowest\n\nnew wider\n")
    other.write_text("wide widest\n")
    both.write_text(one.read_text() + other.read_text())
    _symbols.learn_codes([one, other], 1000, tmp_path / "a")
    _symbols.learn_codes([both], 1000, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    # no other pair occurs twice
    assert _symbols.check_codes(tmp_path / "a") < 50
    for content in ("", "l o\n", "#version: 0.2\n", "#version: 0.2\nl o 5\n"):
        one.write_text(content)
        with pytest.raises(ValueError, match="one is not a file of codes"):
            _symbols.check_codes(one)


@pytest.mark.parametrize(
    ("line", "options", "tokens"),
    [
        # no token is a special symbol of fairseq
        ("<unk> </s> <pad>", {}, "&lt; unk &gt; &lt; / s &gt; &lt; pad &gt;"),
        # each line stays a line, without other blanks
        ("a\u2028b\u0085c\rd\u00a0e\tf\u3000 g ", {}, "a b c d e f g"),
        ("\u201ea\u201c \u2013 b\u2026", {"normalize": True}, "&quot; a &quot; - b ..."),
    ],
)
def test_moses_tokens(line, options, tokens):
    assert _symbols.moses_tokenizer("en", **options)([line]) == [tokens]


def test_limits_are_exact():
    for limits, reasons in (
        ((250, 1.5), {"kept": [(1, 1), (3, 2), (2, 3), (250, 167), (250, 250)]}),
        ((250, 1.5), {"empty": [(0, 1), (0, 0)], "too_unequal": [(4, 2), (5, 8), (250, 166)]}),
        # too long takes precedence over too unequal
        ((250, 1.5), {"too_long": [(251, 250), (1, 251)]}),
        ((3, 1.0), {"kept": [(3, 3)], "too_unequal": [(3, 2)], "too_long": [(4, 4)]}),
        # a ratio that floats cannot represent
        ((99, 1.15), {"kept": [(23, 20), (20, 23)], "too_unequal": [(24, 20)]}),
    ):
        for reason, pairs in reasons.items():
            for lengths in pairs:
                pair = tuple(" ".join(["a"] * length) for length in lengths)
                assert _clean.verdict(pair, *limits) == reason, lengths
