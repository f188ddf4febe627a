import gzip
import os
import re
import signal

import pytest
from sacremoses import MosesDetokenizer

import moses_tokenization
from moses_tokenization import TextSizes, count_lines, in_processes, map_lines, read_lines, tokenize

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
    monkeypatch.setattr(moses_tokenization, "CHUNK", 3)
    lines = [f"Line {number}, isn't it?" if number % 7 else "" for number in range(50)]
    assert tokens(tmp_path, lines, workers=2) == tokens(tmp_path, lines)
    assert tokens(tmp_path, lines)[1] == "Line 1 , isn &apos;t it ?"


def test_lines_are_read_only_a_few_chunks_ahead(monkeypatch):
    monkeypatch.setattr(moses_tokenization, "CHUNK", 2)
    read = []
    lines = (read.append(number) or str(number) for number in range(1000))
    results = in_processes(lines, same_lines, 2)
    assert next(results) == ["0", "1"]
    assert len(read) <= 2 * (2 * moses_tokenization.AHEAD + 1)
    results.close()


def test_language_decides(tmp_path):
    assert tokens(tmp_path, ["l'eau, c'est"], "fr") == ["l&apos; eau , c&apos; est"]
    assert tokens(tmp_path, ["l'eau, c'est"], "en") == ["l &apos;eau , c &apos;est"]


def test_unknown_language_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"^--language xx is none that .* give one of as, bn, .*en"
    ):
        tokens(tmp_path, ["a"], "xx")
    assert not (tmp_path / "target").exists()


def test_punctuation_is_made_uniform_on_request(tmp_path):
    line = "\u201ea\u201c \u2013 b\u2026"
    assert tokens(tmp_path, [line], normalize=True) == ["&quot; a &quot; - b ..."]
    assert "&quot;" not in tokens(tmp_path, [line])[0]


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_lines_of_a_file(tmp_path, name):
    path = tmp_path / name
    content = "\ufeffa b\r\n\n\u2028c\rd\n\u00e9".encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(read_lines(path)) == ["a b", "", "\u2028c\rd", "\u00e9"]
    assert count_lines(path) == 4


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_line_that_is_no_utf8_is_named(tmp_path, name):
    path = tmp_path / name
    content = b"a\nb\nca\xe9f\n"
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    where = re.escape(f"{path}, line 3: byte 3 of the line is no UTF-8 (invalid continuation")
    with pytest.raises(ValueError, match=rf"^{where}.*\): convert the file to UTF-8 or mend"):
        list(read_lines(path))


@pytest.mark.parametrize("content", [gzip.compress(b"a\n" * 999)[:-9], b"plain\n"])
def test_damaged_compressed_file_is_named(tmp_path, content):
    path = tmp_path / "text.gz"
    path.write_bytes(content)
    message = rf"^{re.escape(str(path))}, after line \d+: the file is truncated, damaged or not"
    with pytest.raises(ValueError, match=message):
        list(read_lines(path))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/no cannot be read \(No such file.*\): give"
    ):
        count_lines(tmp_path / "no")


@pytest.mark.parametrize("workers", [1, 2])
def test_failure_while_reading_leaves_no_file(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(moses_tokenization, "CHUNK", 1)
    (tmp_path / "text").write_bytes(b"a\n" * 30 + b"\xff\n")
    with pytest.raises(ValueError, match="text, line 31: byte 1 of the line is no UTF-8"):
        tokenize(read_lines(tmp_path / "text"), 31, tmp_path / "target", "en", workers)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize("expected", [1, 3])
def test_another_number_of_lines_is_refused(tmp_path, expected):
    target = tmp_path / "target"
    message = rf"^tokenize target, {target}: 2 lines of a text of {expected}: leave the text as it"
    with pytest.raises(ValueError, match=message):
        tokenize(["a", "b"], expected, target, "en", 1)
    assert not target.exists()


def same_lines():
    return list


def cut_lines():
    return lambda lines: [line.replace(" ", "\n") for line in lines]


def end_process():
    return lambda lines: os.kill(os.getpid(), signal.SIGKILL)


def test_line_that_becomes_two_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"^cut, .*: 3 lines of a text of 2: leave the text as it is"
    ):
        map_lines(["a b", "c"], 2, tmp_path / "target", cut_lines, 1, "cut")
    assert not (tmp_path / "target").exists()


def test_killed_process_is_told(tmp_path):
    message = "^--workers 2: one of the processes was ended from outside, .*want of memory: give"
    with pytest.raises(ValueError, match=message):
        map_lines(["a"], 1, tmp_path / "target", end_process, 2, "end")
    assert not (tmp_path / "target").exists()


def test_number_of_processes_is_checked():
    with pytest.raises(ValueError, match=r"^--workers 0 is no number of processes: give 1 or more"):
        next(in_processes(["a"], same_lines, 0))
