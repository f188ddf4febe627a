"""fastBPE and subword-nmt give the same units."""

import gzip
import os
import sys
from pathlib import Path

import pytest

from scripts.prepare import _subwords

BESIDE = Path(__file__).parents[4] / "shared/data/multi30k"
DOWNLOADS = Path(os.environ.get("MULTI30K_ARCHIVES", BESIDE))
ODD = [
    "a\u0301e \u00fcber \U0001f600\U0001f600 \ud55c\uad6d\uc5b4 x\u00a0y \u2028 a@@b </w> lo</w>w",
    "",
    "l lo low lower lowest \u4f60\u597d &amp;amp; <unk> \u200d\u200d",
]


def units(codes, lines, monkeypatch, fast):
    with monkeypatch.context() as patch:
        if not fast:
            patch.setitem(sys.modules, "fastBPE", None)
        return _subwords.subword_units(codes)(lines)


def read_texts():
    """Return lines of Multi30k if it is there, else made-up ones."""
    if not DOWNLOADS.is_dir():
        return ["the lower the slower , l\u00f6wer and newer widest"] * 3
    names = ("val.en", "val.de", "val.fr")
    return [
        line
        for name in names
        for line in gzip.decompress((DOWNLOADS / f"{name}.gz").read_bytes()).decode().split("\n")
    ]


def test_fastbpe_and_subword_nmt_give_the_same_units(tmp_path, monkeypatch):
    pytest.importorskip("fastBPE")
    text = tmp_path / "text"
    lines = [" ".join(line.split()) for line in read_texts()]
    text.write_text("\n".join([*lines, *ODD, ""]), encoding="utf-8")
    codes = tmp_path / "codes"
    _subwords.learn([text], 1500, codes)
    fast, slow = (units(codes, [*lines, *ODD], monkeypatch, fast) for fast in (True, False))
    assert fast == slow
    assert any("@@ " in line for line in fast)


def test_units_are_those_of_subword_nmt(tmp_path, monkeypatch):
    from subword_nmt.apply_bpe import BPE

    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nl o\nlo w</w>\ne r</w>\n", encoding="utf-8")
    monkeypatch.setattr(_subwords, "REMEMBERED", 3)
    encoder = BPE(codes.open(encoding="utf-8"))
    for lines in (ODD, ["low lower low"], ODD):
        expected = [encoder.process_line(line) for line in lines]
        assert units(codes, lines, monkeypatch, fast=False) == expected
