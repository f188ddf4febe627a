"""Moses tokens, units of byte pair encoding, and limits on pairs."""

import random
import sys
from argparse import Namespace

import pytest

from scripts.prepare import _lines, _symbols
from scripts.prepare._lines import read_lines
from scripts.prepare._symbols import (
    check_codes,
    learn_codes,
    subword_units,
    verdict,
    write_subwords,
)

ODD = [
    "a\u0301e \u00fcber \U0001f600\U0001f600 \ud55c\uad6d\uc5b4 x\u00a0y \u2028 a@@b </w> lo</w>w",
    "",
    "l lo low lower lowest \u4f60\u597d &amp;amp; <unk> \u200d\u200d",
]


def draw_lines():
    draw = random.Random(1)
    alphabet = "aab\u00e9\u4e2d<&;/w>\U0001f600"
    words = ["".join(draw.choices(alphabet, k=draw.randint(1, 9))) for _ in range(200)]
    return [" ".join(draw.choices(words, k=draw.randint(0, 9))) for _ in range(100)]


def units(codes, lines, monkeypatch, fast):
    with monkeypatch.context() as patch:
        if not fast:
            patch.setitem(sys.modules, "fastBPE", None)
        return subword_units(codes)(lines)


def test_fastbpe_and_subword_nmt_give_the_same_units(tmp_path, monkeypatch):
    pytest.importorskip("fastBPE", reason="fastBPE is not installed")
    text = tmp_path / "text"
    lines = [*draw_lines(), *ODD]
    text.write_text("\n".join([*lines, ""]), encoding="utf-8")
    codes = tmp_path / "codes"
    learn_codes([text], 500, codes)
    fast, slow = (units(codes, lines, monkeypatch, fast) for fast in (True, False))
    assert fast == slow
    assert any("@@ " in line for line in fast)


def test_subword_units_with_a_small_cache_equal_those_of_subword_nmt(tmp_path, monkeypatch):
    from subword_nmt.apply_bpe import BPE

    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nl o\nlo w</w>\ne r</w>\n", encoding="utf-8")
    monkeypatch.setattr(_symbols, "REMEMBERED", 3)
    encoder = BPE(codes.open(encoding="utf-8"))
    for lines in (ODD, ["low lower low"], ODD):
        expected = [encoder.process_line(line) for line in lines]
        assert units(codes, lines, monkeypatch, fast=False) == expected


def test_any_number_of_processes_makes_the_same_units(tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 20)
    lines, codes = draw_lines(), tmp_path / "codes"
    source = tmp_path / "tokens" / "train.txt"
    source.parent.mkdir()
    source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    learn_codes([source], 60, codes)
    expected = subword_units(codes)(lines)
    assert [line.replace("@@ ", "") for line in expected] == lines
    for workers in (1, 2):
        target = tmp_path / str(workers)
        options = Namespace(workers=workers, bpe_codes=codes)
        assert write_subwords(source.parent, {"train": {"txt": []}}, options, target) == 60
        assert list(read_lines(target / "train.txt")) == expected


def test_codes_are_learned_on_all_texts(tmp_path):
    one, other, both = (tmp_path / name for name in ("one", "other", "both"))
    one.write_text("low lower lowest\n\nnew wider\n")
    other.write_text("wide widest\n")
    both.write_text(one.read_text() + other.read_text())
    learn_codes([one, other], 1000, tmp_path / "a")
    learn_codes([both], 1000, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    # no other pair occurs twice
    assert check_codes(tmp_path / "a") < 50
    for content in ("", "l o\n", "#version: 0.2\n", "#version: 0.2\nl o 5\n"):
        one.write_text(content)
        with pytest.raises(ValueError, match="one is not a file of codes"):
            check_codes(one)


@pytest.mark.parametrize(
    ("line", "language", "options", "tokens"),
    [
        # no token is a special symbol of fairseq
        ("<unk> </s> <pad>", "en", {}, "&lt; unk &gt; &lt; / s &gt; &lt; pad &gt;"),
        # each line stays a line, without other blanks
        ("a\u2028b\u0085c\rd\u00a0e\tf\u3000 g ", "en", {}, "a b c d e f g"),
        ("a well-known b", "en", {"aggressive_hyphens": True}, "a well @-@ known b"),
        ("\u201ea\u201c \u2013 b\u2026", "en", {"normalize": True}, "&quot; a &quot; - b ..."),
    ],
)
def test_moses_tokens(line, language, options, tokens):
    assert _symbols.moses_tokenizer(language, **options)([line]) == [tokens]


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
                assert verdict(pair, *limits) == reason, lengths
