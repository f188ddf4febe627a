import pytest
from sacremoses import MosesDetokenizer

from scripts.prepare import _lines as parallel_lines
from scripts.prepare._lines import TextSizes
from scripts.prepare._moses import check_language, tokenize

SENTENCES = [
    "\"Don't panic,\" she said (twice) - it's 5,300.50 km to Dr. Smith's house!",
    "A <unk> & a </s> | [b] cost $3 at 10:30; e.g. in the U.S. it rained. Then it stopped.",
    "",
    "\u00c9t\u00e9 \u00fcber na\u00efve caf\u00e9s...",
]


def tokens(tmp_path, lines, language="en", workers=1, **options):
    target = tmp_path / "target"
    sizes = tokenize(lines, len(lines), target, language, workers, **options)
    text = target.read_bytes().decode()
    assert text.endswith("\n")
    found = text[:-1].split("\n")
    words = sum(len(line.split(" ")) for line in found if line)
    assert sizes == TextSizes(lines=len(lines), empty=found.count(""), words=words)
    return found


def test_tokens_are_turned_back_into_the_text(tmp_path):
    found = tokens(tmp_path, SENTENCES)
    detokenizer = MosesDetokenizer(lang="en")
    back = [detokenizer.detokenize(line.split(" ")) for line in found]
    # only the blanks around what Moses cuts off words may differ
    assert [line.replace(" ", "") for line in back] == [line.replace(" ", "") for line in SENTENCES]
    assert back[0] == SENTENCES[0]
    assert back[3] == SENTENCES[3]


def test_no_token_is_a_symbol_of_fairseq(tmp_path):
    (line,) = tokens(tmp_path, ["<unk> </s> <s> <pad>"])
    assert line == "&lt; unk &gt; &lt; / s &gt; &lt; s &gt; &lt; pad &gt;"


def test_each_line_stays_a_line_without_other_blanks(tmp_path):
    lines = ["a\u2028b\u0085c\rd\u00a0e\tf", "", "\x07", "  g\u3000 h ", "i\x1cj\x0bk"]
    assert tokens(tmp_path, lines) == ["a b c d e f", "", "", "g h", "i j k"]


def test_processes_make_the_same_tokens_in_the_same_order(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_lines, "CHUNK", 3)
    lines = [f"Line {number}, isn't it?" if number % 7 else "" for number in range(50)]
    assert tokens(tmp_path, lines, workers=2) == tokens(tmp_path, lines)
    assert tokens(tmp_path, lines)[1] == "Line 1 , isn &apos;t it ?"


def test_language_decides(tmp_path):
    assert tokens(tmp_path, ["l'eau, c'est"], "fr") == ["l&apos; eau , c&apos; est"]
    assert tokens(tmp_path, ["l'eau, c'est"], "en") == ["l &apos;eau , c &apos;est"]


def test_hyphens_are_tokens_on_request(tmp_path):
    assert tokens(tmp_path, ["a well-known b - c"], aggressive_hyphens=True) == [
        "a well @-@ known b - c"
    ]
    assert tokens(tmp_path, ["a well-known b"]) == ["a well-known b"]


def test_unknown_language_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"^--language xx is none that .* give one of as, bn, .*en"
    ):
        tokens(tmp_path, ["a"], "xx")
    assert not (tmp_path / "target").exists()
    with pytest.raises(ValueError, match=r"^--source-lang xx is none that"):
        check_language("xx", "source-lang")


def test_punctuation_is_made_uniform_on_request(tmp_path):
    line = "\u201ea\u201c \u2013 b\u2026"
    assert tokens(tmp_path, [line], normalize=True) == ["&quot; a &quot; - b ..."]
    assert "&quot;" not in tokens(tmp_path, [line])[0]
