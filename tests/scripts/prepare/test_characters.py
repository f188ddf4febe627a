"""enwik8 and text8, from small archives."""

import json

import pytest

from tests.scripts.prepare.prepared import SPLITS, lines, refused, write_files, zipped
from tests.scripts.prepare.published import CHARACTERS, LETTERS, expect_small, write_archives


def parts(text):
    return zip(SPLITS, (text[:500], text[500:600], text[600:]), strict=True)


# the items that fairseq reads
BYTES = {
    split: [" ".join([*map(str, line), "</s>"]) for line in part.rstrip(b"\n").split(b"\n")]
    for split, part in parts(CHARACTERS)
}
SYMBOLS = {split: [" ".join(part.decode().replace(" ", "_"))] for split, part in parts(LETTERS)}


@pytest.fixture
def prepare(call, tmp_path, monkeypatch):
    def prepare(name, *options, **changes):
        main = expect_small(monkeypatch, name, **changes)
        return call(main, "--output", tmp_path / "out", *options)

    return prepare


def read(tmp_path):
    return {split: lines(tmp_path / "out" / "bin", split) for split in SPLITS}


def read_json(path):
    return json.loads(path.read_text())


def test_bytes_with_line_ends_as_symbols_and_without(prepare, tmp_path):
    source, out = write_archives(tmp_path / "archives", "enwik8"), tmp_path / "out"
    status, _, error = prepare("enwik8", "--from", source, "--newlines", "eos")
    assert (status, error) == (0, "")
    assert read(tmp_path) == BYTES
    assert read_json(out / "bin" / "units.json")["unit"] == "bytes"
    description = read_json(out / "preparation.json")
    assert description["vocabulary"] == 4
    for split, items in BYTES.items():
        assert description["splits"][split]["tokens"] == len(" ".join(items).split())
    words = ("--from", source, "--newlines", "drop", "--output", tmp_path / "dropped")
    assert prepare("enwik8", *words)[0] == 0
    (line,) = lines(tmp_path / "dropped" / "bin", "train")
    assert line.split() == [str(byte) for byte in CHARACTERS[:500] if byte != 10]
    assert read_json(tmp_path / "dropped" / "preparation.json")["vocabulary"] == 3


def test_letters_with_a_new_and_another_dictionary(prepare, tmp_path):
    source = write_archives(tmp_path / "archives", "text8")
    assert prepare("text8", "--from", source)[0] == 0
    assert read(tmp_path) == SYMBOLS
    units = read_json(tmp_path / "out" / "bin" / "units.json")
    assert (units["unit"], units["symbols"]) == ("characters", {" ": "_"})
    srcdict = tmp_path / "dict.txt"
    srcdict.write_text("_ 3\nb 2\na 1\n")
    words = ("--from", source, "--srcdict", srcdict, "--output", tmp_path / "other")
    assert prepare("text8", *words)[0] == 0
    assert lines(tmp_path / "other" / "bin", "test") == SYMBOLS["test"]
    assert (tmp_path / "other/bin/dict.txt").read_text() == "_ 3\nb 2\na 1\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--from {}/x.zip", "x.zip lacks text8"),
        ("--from {}/cut.zip", "cut.zip"),
        ("--from {}/other.zip", "other.zip"),
        ("--from {}/text8 --srcdict {}/few.txt", "--srcdict"),
    ],
)
def test_what_cannot_be_used_is_refused_and_leaves_nothing(prepare, tmp_path, options, named):
    files = {"x.zip": zipped({"text9": b""}), "cut.zip": zipped({"text8": LETTERS})[:-30]}
    # text8 is the plain text
    files |= {"other.zip": zipped({"text8": LETTERS[::-1]}), "few.txt": "a 1\n", "text8": LETTERS}
    write_files(tmp_path, files)
    words = options.replace("{}", str(tmp_path)).split()
    assert refused(prepare("text8", *words), named)
    assert not (tmp_path / "out").exists()
    assert refused(prepare("text8", "--from", tmp_path / "text8", vocabulary=11), "3 symbols", "11")
    assert not (tmp_path / "out").exists()
