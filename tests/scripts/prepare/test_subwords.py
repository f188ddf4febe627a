import random
import re
import sys
from argparse import Namespace

import pytest
from sacremoses import MosesDetokenizer

from scripts.prepare import _lines, _subwords
from scripts.prepare._subwords import (
    TOOLS,
    RawText,
    apply,
    check_language,
    check_subword_options,
    count_words,
    learn,
)

TRAIN = "low lower lowest\n\nlow newer wider new\nlow low lowest\n"
OTHER = "newest lower \u00fcber\U0001f600 low\n\nx\n"
SENTENCES = [
    "\"Don't panic,\" she said (twice) - it's 5,300.50 km to Dr. Smith's house!",
    "A <unk> & a </s> | [b] cost $3 at 10:30; e.g. in the U.S. it rained. Then it stopped.",
    "",
    "\u00c9t\u00e9 \u00fcber na\u00efve caf\u00e9s...",
]


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(TRAIN, encoding="utf-8")
    return path


@pytest.fixture
def codes(tmp_path, train):
    path = tmp_path / "codes"
    learn([train], 4, path)
    return path


def units(tmp_path, codes, text, tool, workers=1):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text(text, encoding="utf-8", newline="")
    expected = text.count("\n") + (not text.endswith("\n"))
    sizes = apply(tool, codes, source, {"lines": expected}, workers, target)
    lines = target.read_text(encoding="utf-8").split("\n")[:-1]
    words = sum(map(len, map(str.split, lines)))
    assert sizes == {"lines": expected, "empty": lines.count(""), "words": words}
    return lines


def joined(lines):
    return [line.replace("@@ ", "") for line in lines]


def test_codes_are_the_most_frequent_pairs(codes):
    # 7 times l o; then 4 times w e and lo w at the end, 3 times lo we
    assert codes.read_text(encoding="utf-8").splitlines() == [
        "#version: 0.2",
        "l o",
        "w e",
        "lo w</w>",
        "lo we",
    ]


@pytest.mark.parametrize("tool", TOOLS)
def test_units_join_to_the_words_of_each_line(tmp_path, codes, tool):
    lines = units(tmp_path, codes, OTHER, tool)
    assert lines == [
        "n@@ e@@ we@@ s@@ t lowe@@ r \u00fc@@ b@@ e@@ r@@ \U0001f600 low",
        "",
        "x",
    ]
    assert joined(lines) == OTHER.splitlines()


@pytest.mark.parametrize("tool", TOOLS)
def test_one_space_is_between_units(tmp_path, codes, tool):
    text = "  low \t low\u00a0x \r\n \nlow"
    assert units(tmp_path, codes, text, tool) == ["low low x", "", "low"]


def test_both_tools_and_any_processes_make_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 20)
    # forgetting words changes nothing either
    monkeypatch.setattr(_subwords, "REMEMBERED", 1)
    draw = random.Random(1)
    words = [
        "".join(draw.choices("aab\u00e9\u4e2d<&;/w>", k=draw.randint(1, 9))) for _ in range(200)
    ]
    lines = [" ".join(draw.choices(words, k=draw.randint(0, 9))) for _ in range(100)]
    text = "".join(f"{line}\n" for line in lines)
    (tmp_path / "text").write_text(text, encoding="utf-8")
    learn([tmp_path / "text"], 60, tmp_path / "codes")
    expected = units(tmp_path, tmp_path / "codes", text, "subword-nmt")
    assert joined(expected) == lines
    assert units(tmp_path, tmp_path / "codes", text, "fastbpe") == expected
    for tool in TOOLS:
        assert units(tmp_path, tmp_path / "codes", text, tool, workers=2) == expected


def test_codes_of_several_texts_are_those_of_both_together(tmp_path, train):
    other, both = tmp_path / "other.txt", tmp_path / "both.txt"
    other.write_text("wide wider widest\n" * 9, encoding="utf-8")
    both.write_text(other.read_text() + train.read_text(), encoding="utf-8")
    assert count_words([train, other]) == count_words([both])
    assert learn([train, other], 9, tmp_path / "a") == learn([both], 9, tmp_path / "b") == 9
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    learn([train], 9, tmp_path / "c")
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_codes_end_where_no_pair_is_left(tmp_path, train):
    found = learn([train], 1000, tmp_path / "codes")
    assert found < 50
    assert len((tmp_path / "codes").read_text().splitlines()) == found + 1


@pytest.mark.parametrize("text", ["", "\n", "a b c a\n", "ab\n"])
def test_text_without_pairs_is_refused(tmp_path, text):
    source = tmp_path / "source"
    source.write_text(text)
    message = f"^{source}: no two characters follow each other twice within words, .*: give more"
    with pytest.raises(ValueError, match=message):
        learn([source], 10, tmp_path / "codes")
    assert not (tmp_path / "codes").exists()


def test_text_that_is_no_utf8_is_refused(tmp_path):
    (tmp_path / "source").write_bytes(b"aa aa\n\xff\n")
    with pytest.raises(ValueError, match="source, line 2: byte 1 of the line is no UTF-8"):
        learn([tmp_path / "source"], 10, tmp_path / "codes")
    assert not (tmp_path / "codes").exists()


@pytest.mark.parametrize("content", ["", "l o\n", "#version: 0.2\n", "#version: 0.2\nl o 5\n"])
def test_file_that_holds_no_codes_is_refused(tmp_path, train, content):
    codes = tmp_path / "codes"
    codes.write_text(content)
    with pytest.raises(ValueError, match=rf"^{codes} is no file of codes: give one that begins"):
        units(tmp_path, codes, "a\n", "subword-nmt")


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\nb c@@ d\n", "line 2: a word ends with @@, which marks a unit within a word: tokenize"),
        ("a\nb @@", "line 2: a word ends with @@"),
        ("a\0b\n", "line 1: a word has a zero byte, where fastBPE would end the line: tokenize"),
    ],
)
def test_words_whose_units_would_not_join_are_refused(tmp_path, codes, tool, text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{tmp_path}/source, {message}')}"):
        units(tmp_path, codes, text, tool)


def test_joiner_within_a_word_is_a_part_of_it(tmp_path, codes):
    for tool in TOOLS:
        assert joined(units(tmp_path, codes, "a@@b @x\n", tool)) == ["a@@b @x"]


def test_another_number_of_lines_is_refused(tmp_path, codes, train):
    with pytest.raises(ValueError, match=r"^units target, .*: 4 lines, the text has 5: leave it"):
        apply("fastbpe", codes, train, {"lines": 5}, 1, tmp_path / "target")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bpe_size": 0}, "--bpe-size is 0: it must be at least 1"),
        ({"workers": 0}, "--workers is 0: it must be at least 1"),
        ({"bpe_tool": "x"}, "--bpe-tool x is unknown: give fastbpe or subword-nmt"),
    ],
)
def test_options_are_checked(changes, message):
    options = {"bpe_size": 1, "bpe_tool": "fastbpe", "workers": 1}
    check_subword_options(Namespace(**options))
    with pytest.raises(ValueError, match=f"^{message}$"):
        check_subword_options(Namespace(**{**options, **changes}))


def test_missing_fastbpe_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "fastBPE", None)
    message = r"^--bpe-tool fastbpe: fastBPE is not installed \(.*\): .* --bpe-tool subword-nmt"
    with pytest.raises(ValueError, match=message):
        check_subword_options(Namespace(bpe_size=1, bpe_tool="fastbpe", workers=1))
    check_subword_options(Namespace(bpe_size=1, bpe_tool="subword-nmt", workers=1))


def test_fastbpe_does_not_tell_of_codes_that_it_reads(tmp_path, codes, capfd):
    units(tmp_path, codes, "low\n", "fastbpe")
    assert capfd.readouterr().err == ""
    print("still there", file=sys.stderr)
    assert capfd.readouterr().err == "still there\n"


def tokens(tmp_path, lines, language="en", workers=1, **options):
    target = tmp_path / "target"
    sizes = {"lines": len(lines)}
    sizes = RawText(lambda: lines, sizes, language, **options).tokenize(workers, target)
    text = target.read_bytes().decode()
    assert text.endswith("\n")
    found = text[:-1].split("\n")
    words = sum(len(line.split(" ")) for line in found if line)
    assert sizes == {"lines": len(lines), "empty": found.count(""), "words": words}
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
    monkeypatch.setattr(_lines, "CHUNK", 3)
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


def test_unknown_language_is_refused():
    with pytest.raises(
        ValueError, match=r"^--language xx is none that .* give one of as, bn, .*en"
    ):
        check_language("xx")
    with pytest.raises(ValueError, match=r"^--source-lang xx is none that"):
        check_language("xx", "source-lang")


def test_punctuation_is_made_uniform_on_request(tmp_path):
    line = "\u201ea\u201c \u2013 b\u2026"
    assert tokens(tmp_path, [line], normalize=True) == ["&quot; a &quot; - b ..."]
    assert "&quot;" not in tokens(tmp_path, [line])[0]
