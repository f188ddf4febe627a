"""Words and units of byte pair encoding."""

import random
from argparse import Namespace

import pytest

from scripts.prepare import _lines, _subwords
from scripts.prepare._lines import read_lines
from scripts.prepare._subwords import check_codes, learn, make_units, subword_units


def test_any_number_of_processes_makes_the_same_units(tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 20)
    draw = random.Random(1)
    alphabet = "aab\u00e9\u4e2d<&;/w>\U0001f600"
    words = ["".join(draw.choices(alphabet, k=draw.randint(1, 9))) for _ in range(200)]
    lines = [" ".join(draw.choices(words, k=draw.randint(0, 9))) for _ in range(100)]
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    learn([tmp_path / "source"], 60, tmp_path / "codes")
    units = subword_units(tmp_path / "codes")(lines)
    assert [line.replace("@@ ", "") for line in units] == lines
    # forgetting words changes nothing
    monkeypatch.setattr(_subwords, "REMEMBERED", 1)
    for workers in (1, 2):
        target = tmp_path / str(workers)
        target.mkdir()
        options = Namespace(workers=workers, bpe_codes=tmp_path / "codes")
        assert make_units(tmp_path, ["source"], [], options, target) == 60
        assert list(read_lines(target / "source")) == units


def test_codes_are_learned_on_all_texts(tmp_path):
    one, other, both = (tmp_path / name for name in ("one", "other", "both"))
    one.write_text("low lower lowest\n\nnew wider\n")
    other.write_text("wide widest\n")
    both.write_text(one.read_text() + other.read_text())
    learn([one, other], 1000, tmp_path / "a")
    learn([both], 1000, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    # no other pair is there twice
    assert check_codes(tmp_path / "a") < 50
    for content in ("", "l o\n", "#version: 0.2\n", "#version: 0.2\nl o 5\n"):
        one.write_text(content)
        with pytest.raises(ValueError, match=r"one is no file of codes: give one that begins"):
            check_codes(one)


@pytest.mark.parametrize(
    ("line", "language", "options", "tokens"),
    [
        # no token is a symbol of fairseq
        ("<unk> </s> <pad>", "en", {}, "&lt; unk &gt; &lt; / s &gt; &lt; pad &gt;"),
        # each line stays a line, without other blanks
        ("a\u2028b\u0085c\rd\u00a0e\tf\u3000 g ", "en", {}, "a b c d e f g"),
        ("l'eau, c'est", "fr", {}, "l&apos; eau , c&apos; est"),
        ("a well-known b", "en", {"aggressive_hyphens": True}, "a well @-@ known b"),
        ("a well-known b", "en", {}, "a well-known b"),
        ("\u201ea\u201c \u2013 b\u2026", "en", {"normalize": True}, "&quot; a &quot; - b ..."),
    ],
)
def test_moses_tokens(line, language, options, tokens):
    assert _subwords.moses_tokenizer(language, **options)([line]) == [tokens]
