import random
import re
import sys

import pytest

from scripts.prepare import _bpe as subword_units
from scripts.prepare import _lines as parallel_lines
from scripts.prepare._bpe import TOOLS, apply, check_size, check_tool, count_words, learn
from scripts.prepare._lines import TextSizes

TRAIN = "low lower lowest\n\nlow newer wider new\nlow low lowest\n"
OTHER = "newest lower \u00fcber\U0001f600 low\n\nx\n"


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.txt"
    path.write_text(TRAIN, encoding="utf-8")
    return path


@pytest.fixture
def codes(tmp_path, train):
    path = tmp_path / "codes"
    learn([train], path, 4)
    return path


def units(tmp_path, codes, text, tool, workers=1):
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text(text, encoding="utf-8", newline="")
    expected = text.count("\n") + (not text.endswith("\n"))
    sizes = apply(tool, codes, source, expected, target, workers)
    lines = target.read_text(encoding="utf-8").split("\n")[:-1]
    words = sum(map(len, map(str.split, lines)))
    assert sizes == TextSizes(lines=expected, empty=lines.count(""), words=words)
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
    monkeypatch.setattr(parallel_lines, "CHUNK", 20)
    # forgetting words changes nothing either
    monkeypatch.setattr(subword_units, "REMEMBERED", 1)
    draw = random.Random(1)
    words = [
        "".join(draw.choices("aab\u00e9\u4e2d<&;/w>", k=draw.randint(1, 9))) for _ in range(200)
    ]
    lines = [" ".join(draw.choices(words, k=draw.randint(0, 9))) for _ in range(100)]
    text = "".join(f"{line}\n" for line in lines)
    (tmp_path / "text").write_text(text, encoding="utf-8")
    learn([tmp_path / "text"], tmp_path / "codes", 60)
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
    assert learn([train, other], tmp_path / "a", 9) == learn([both], tmp_path / "b", 9) == 9
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    learn([train], tmp_path / "c", 9)
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_codes_end_where_no_pair_is_left(tmp_path, train):
    found = learn([train], tmp_path / "codes", 1000)
    assert found < 50
    assert len((tmp_path / "codes").read_text().splitlines()) == found + 1


@pytest.mark.parametrize("text", ["", "\n", "a b c a\n", "ab\n"])
def test_text_without_pairs_is_refused(tmp_path, text):
    source = tmp_path / "source"
    source.write_text(text)
    message = f"^{source}: no two characters follow each other twice within words, .*: give more"
    with pytest.raises(ValueError, match=message):
        learn([source], tmp_path / "codes", 10)
    assert not (tmp_path / "codes").exists()


def test_text_that_is_no_utf8_is_refused(tmp_path):
    (tmp_path / "source").write_bytes(b"aa aa\n\xff\n")
    with pytest.raises(ValueError, match="source, line 2: byte 1 of the line is no UTF-8"):
        learn([tmp_path / "source"], tmp_path / "codes", 10)
    assert not (tmp_path / "codes").exists()


def test_size_is_checked():
    with pytest.raises(ValueError, match=r"^--bpe-size 0 is no number of merges: give 1 or more$"):
        check_size(0)


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
    assert not (tmp_path / "target").exists()


def test_joiner_within_a_word_is_a_part_of_it(tmp_path, codes):
    for tool in TOOLS:
        assert joined(units(tmp_path, codes, "a@@b @x\n", tool)) == ["a@@b @x"]


def test_another_number_of_lines_is_refused(tmp_path, codes, train):
    with pytest.raises(
        ValueError, match=r"^units target, .*: 4 lines of a text of 5: leave the text"
    ):
        apply("fastbpe", codes, train, 5, tmp_path / "target", 1)
    assert not (tmp_path / "target").exists()


def test_tool_is_checked(monkeypatch):
    with pytest.raises(ValueError, match=r"^--bpe-tool x is unknown: give fastbpe or subword-nmt$"):
        check_tool("x")
    monkeypatch.setitem(sys.modules, "fastBPE", None)
    message = r"^--bpe-tool fastbpe: fastBPE is not installed \(.*\): .* --bpe-tool subword-nmt"
    with pytest.raises(ValueError, match=message):
        check_tool("fastbpe")
    check_tool("subword-nmt")


def test_fastbpe_does_not_tell_of_codes_that_it_reads(tmp_path, codes, capfd):
    units(tmp_path, codes, "low\n", "fastbpe")
    assert capfd.readouterr().err == ""
    print("still there", file=sys.stderr)
    assert capfd.readouterr().err == "still there\n"
