"""Stages of a preparation, reading lines, worker processes for them, and subword units."""

import json
import os
import random
import re
import signal
from argparse import Namespace
from functools import partial

import pytest

from scripts._shared.command_line import exit_status
from scripts.prepare import _lines, _subwords
from scripts.prepare._lines import in_processes, read_lines, write_lines
from scripts.prepare._stages import Stages
from scripts.prepare._subwords import check_codes, learn, make_units, subword_units
from tests.scripts.prepare.prepared import write_files


def write(content):
    return lambda folder: (folder / "file").write_text(content)


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "full"), 1), (KeyboardInterrupt, 130)])
def test_a_stopped_stage_leaves_nothing_and_starts_again(tmp_path, capsys, error, status):
    out = tmp_path / "out"

    def stop(folder):
        write("half")(folder)
        raise error

    def prepare(second):
        stages = Stages(out, {"a": 1})
        assert stages.run("first", write("one")) == 3
        assert stages.run("second", second, {"b": 2}) == 5
        stages.finish({"found": True})

    assert exit_status(lambda: Stages(out, {}).run("first", stop), output=out) == status
    assert not out.exists()
    assert exit_status(lambda: prepare(stop), output=out) == status
    assert [path.name for path in out.iterdir()] == ["first"]
    # left by a killed run
    (out / "second.partial-1").mkdir()
    capsys.readouterr()
    assert exit_status(lambda: prepare(write("three")), output=out) == 0
    assert capsys.readouterr().out.startswith("first: complete\nsecond: at work\n")
    assert (out / "second" / "file").read_text() == "three"
    assert not list(out.glob("*.partial-*"))
    found = json.loads((out / "preparation.json").read_text())
    assert found == {"a": 1, "b": 2, "found": True}


def test_another_option_names_what_to_remove(tmp_path):
    def prepare(second=2, third=(3, None)):
        stages = Stages(tmp_path, {"a": 1})
        stages.run("first", write("x"))
        stages.run("second", write("x"), {"b": second})
        stages.run("third", write("x"), {"c": third})

    prepare()
    prepare()
    for changes, named, stale in (
        ({"second": 5}, "second was made with another --b (2, now 5)", ("second", "third")),
        ({"third": (4, 5)}, "third was made with another --c ([3, None], now [4, 5])", ("third",)),
    ):
        folders = ", ".join(f"{tmp_path}/{name}" for name in stale)
        message = f"{named}: give another folder, or remove {folders} to"
        with pytest.raises(ValueError, match=re.escape(message)):
            prepare(**changes)
    # made by something else
    (tmp_path / "bin").mkdir()
    with pytest.raises(ValueError, match="bin in it was not made by this command: remove it"):
        Stages(tmp_path, {}).run("bin", write("x"))
    assert not list((tmp_path / "bin").iterdir())


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_lines_of_a_file(tmp_path, name):
    write_files(tmp_path, {name: "\ufeffa b\r\n\n\u2028c\rd\n\u00e9"})
    assert list(read_lines(tmp_path / name)) == ["a b", "", "\u2028c\rd", "\u00e9"]


def same_lines():
    return list


def end_process():
    return lambda lines: os.kill(os.getpid(), signal.SIGKILL)


def hold(fifo):
    held = fifo.open("wb")
    return lambda lines: (held, lines)[1]


def wait_for_work(fifo):
    results = in_processes(["a"], partial(hold, fifo), 2)
    next(results)
    signal.pause()


def test_lines_keep_their_order_and_are_read_only_a_little_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 2)
    read = []
    lines = (read.append(number) or f"{number} x" for number in range(100))
    results = in_processes(lines, same_lines, 2)
    assert next(results) == ["0 x", "1 x"]
    assert len(read) <= 2 * 2 * _lines.AHEAD
    results.close()
    lines = [f"{number} x" for number in range(100)]
    sizes = write_lines([*lines, ""], tmp_path / "target", same_lines, 2, "copy")
    assert sizes == {"lines": 101, "words": 200}
    assert (tmp_path / "target").read_text() == "\n".join([*lines, "", ""])


def test_a_killed_process_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^--workers 2: one of the processes"):
        write_lines(["a"], tmp_path / "target", end_process, 2, "end")


def test_processes_end_with_the_one_that_is_killed(assert_end_together):
    assert_end_together(wait_for_work)


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
    # a small cache of words changes nothing
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
    # no other pair occurs twice
    assert check_codes(tmp_path / "a") < 50
    for content in ("", "l o\n", "#version: 0.2\n", "#version: 0.2\nl o 5\n"):
        one.write_text(content)
        with pytest.raises(ValueError, match=r"one is not a file of codes: give one that begins"):
            check_codes(one)


@pytest.mark.parametrize(
    ("line", "language", "options", "tokens"),
    [
        # no token is a special symbol of fairseq
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
