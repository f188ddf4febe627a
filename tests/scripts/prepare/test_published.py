"""The five published data sets of language modelling, each on a small archive of its kind."""

import dataclasses
import hashlib
import importlib
import io
import json
import shutil

import numpy as np
import pytest
from fairseq.data.indexed_dataset import MMapIndexedDataset

from scripts.prepare import _binarize, _published, lm1b
from tests.scripts.prepare.prepared import (
    SPLITS,
    lines,
    refused,
    serve,
    tarred,
    zipped,
)

CHARACTERS = b"ab\n ab\n" * 100
LETTERS = b"ab ab a" * 100
TEXTS = {"train": b"a a b\n\na <unk>\n", "valid": b"a c\n", "test": b"b\n"}
WORDS = {"train": ["a a b </s>", "</s>", "a <unk> </s>"], "valid": ["a <unk> </s>"]}
WORDS["test"] = ["b </s>"]
# two shards train, the rare word is <unk> and a heldout shard is left out
NEWS = {
    "news.en-00001-of-00100": b"a a b\n",
    "news.en.heldout-00002-of-00050": b"zzz\n",
    "news.en.heldout-00000-of-00050": b"b\n",
    "news.en-00002-of-00100": b"a b b\n",
    "news.en.heldout-00001-of-00050": b"a c\n",
}
SIZES = (500, 100, 100)
WIKITEXT = {f"wiki.{split}.tokens": text for split, text in TEXTS.items()}
PTB = {f"ptb.{split}.txt": text for split, text in TEXTS.items()}
# what a mirror has, the text that has a checksum, changes, expected symbols, unit
SMALL = {
    "enwik8": ({"enwik8.zip": zipped({"enwik8": CHARACTERS})}, CHARACTERS, 4, None, "bytes"),
    "text8": ({"text8.zip": zipped({"text8": LETTERS})}, LETTERS, 3, None, "characters"),
    "wikitext103": ({"wikitext-103-v1.zip": zipped(WIKITEXT)}, None, 4, WORDS, "words"),
    "ptb": (PTB, None, 4, WORDS, "words"),
    "lm1b": (
        {lm1b.ARCHIVE: tarred(NEWS)},
        None,
        5,
        {"train": ["a a b </s>", "a b b </s>"], "valid": ["a <unk> </s>"], "test": ["b </s>"]},
        "words",
    ),
}


def data_set(name):
    return getattr(importlib.import_module(f"scripts.prepare.{name}"), name.upper())


def digest(algorithm, content):
    return f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}"


@pytest.fixture
def small(monkeypatch):
    """The data sets in small, with no mirror of their own."""
    made = {}
    for name, (files, text, vocabulary, _, _) in SMALL.items():
        published = data_set(name)
        changes = {"mirrors": (), "vocabulary": vocabulary}
        if text is None:
            changes["files"] = {file: digest("md5", content) for file, content in files.items()}
        else:
            changes |= {"checksum": digest("md5", text), "sizes": SIZES}
        if name == "lm1b":
            changes["splits"] = {
                member: "valid" if "-00001-of-00050" in member else "test"
                for member in NEWS
                if "heldout" in member and "-00002-" not in member
            } | {member: "train" for member in NEWS if "heldout" not in member}
        made[name] = dataclasses.replace(published, **changes)
    return made


@pytest.fixture
def prepare(small, call, tmp_path):
    def prepare(name, *options):
        words = ["--output", tmp_path / "out", *options]
        if name not in ("enwik8", "text8") and "--workers" not in options:
            words += ["--workers", "1"]
        description = f"Data.\n\n    python -m scripts.prepare.{name}\n"
        return call(lambda given: _published.run(small[name], description, given), *words)

    return prepare


def given(tmp_path, name):
    """What --from takes: an archive, or for PTB a folder."""
    folder = tmp_path / "given"
    folder.mkdir(exist_ok=True)
    for file, content in SMALL[name][0].items():
        (folder / file).write_bytes(content)
    return folder if name == "ptb" else folder / next(iter(SMALL[name][0]))


def options_of(name):
    return ("--newlines", "eos") if name == "enwik8" else ()


def expected(name):
    if words := SMALL[name][3]:
        return words
    parts = [SMALL[name][1][first:last] for first, last in ((0, 500), (500, 600), (600, 700))]
    if name == "text8":
        found = [[" ".join(part.decode().replace(" ", "_"))] for part in parts]
    else:
        found = [
            [" ".join([*map(str, line), "</s>"]) for line in part.removesuffix(b"\n").split(b"\n")]
            for part in parts
        ]
    return dict(zip(SPLITS, found, strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_the_data_of_an_archive_that_is_here(prepare, tmp_path, name):
    source, out = given(tmp_path, name), tmp_path / "out"
    status, printed, error = prepare(name, "--from", source, *options_of(name))
    assert (status, error) == (0, "")
    assert {split: lines(out / "bin", split) for split in SPLITS} == expected(name)
    assert sorted(path.name for path in out.iterdir()) == ["bin", "preparation.json"]
    units = json.loads((out / "bin" / "units.json").read_text())
    assert units["unit"] == SMALL[name][4]
    assert units["symbols"] == ({" ": "_"} if name == "text8" else {})
    found = json.loads((out / "preparation.json").read_text())
    assert found["vocabulary"] == SMALL[name][2]
    for split in SPLITS:
        text = " ".join(lines(out / "bin", split))
        assert found["splits"][split]["tokens"] == len(text.split())
        assert found["splits"][split]["unknown"] == text.count("<unk>")

    # the second run does nothing, without the source
    before = {path: path.stat().st_mtime_ns for path in (out / "bin").rglob("*")}
    shutil.rmtree(tmp_path / "given")
    status, printed, _ = prepare(name, *options_of(name))
    assert (status, printed.splitlines()[0]) == (0, "bin: complete")
    assert {path: path.stat().st_mtime_ns for path in (out / "bin").rglob("*")} == before


@pytest.mark.parametrize("name", ["enwik8", "ptb"])
def test_the_data_of_a_mirror_also_after_a_broken_download(prepare, tmp_path, name):
    files, options = SMALL[name][0], options_of(name)
    with serve(files, cut=3) as (url, _):
        assert refused(prepare(name, "--mirror", url, *options), "--mirror", "--from")
    assert not (tmp_path / "out").exists()
    with serve({}) as (empty, first), serve(files) as (url, second):
        mirrors = ("--mirror", empty, "--mirror", f"{url}/")
        status, _, error = prepare(name, *mirrors, *options)
    assert (status, error) == (0, "")
    assert {split: lines(tmp_path / "out/bin", split) for split in SPLITS} == expected(name)
    assert first == second == list(files)
    assert not (tmp_path / "out" / "download").exists()


def test_what_a_mirror_sent_in_place_of_the_data_is_not_kept(prepare, tmp_path):
    for sent in (b"<html>moved</html>", zipped({"text8": b"other"})):
        with serve({"text8.zip": sent}) as (url, _):
            assert refused(prepare("text8", "--mirror", url), "text8")
        assert not (tmp_path / "out").exists()


def test_a_raw_text_and_an_archive_of_several_texts(prepare, tmp_path):
    for name, content in (("text8", LETTERS), ("ptb", tarred(PTB))):
        file, out = tmp_path / f"any_{name}", tmp_path / name
        file.write_bytes(content)
        assert prepare(name, "--from", file, "--output", out)[0] == 0
        assert {split: lines(out / "bin", split) for split in SPLITS} == expected(name)


@pytest.mark.parametrize("name", ["enwik8", "text8", "ptb"])
def test_a_given_dictionary_is_used(prepare, tmp_path, name):
    srcdict = tmp_path / "dict.txt"
    text = {"enwik8": "32 3\n98 2\n97 1\n", "text8": "_ 3\nb 2\na 1\n"}.get(name, "b 2\n")
    srcdict.write_text(text)
    words = ("--from", given(tmp_path, name), *options_of(name), "--srcdict", srcdict)
    assert prepare(name, *words)[0] == 0
    assert (tmp_path / "out/bin/dict.txt").read_text() == text
    found = {split: lines(tmp_path / "out/bin", split) for split in SPLITS}
    if SMALL[name][3]:
        assert found["train"][0] == "<unk> <unk> b </s>"
    else:
        assert found == expected(name)


def test_dropped_newlines(prepare, tmp_path):
    assert prepare("enwik8", "--from", given(tmp_path, "enwik8"), "--newlines", "drop")[0] == 0
    (line,) = lines(tmp_path / "out/bin", "train")
    assert line.split() == [str(byte) for byte in CHARACTERS[:500] if byte != 10]
    found = json.loads((tmp_path / "out" / "preparation.json").read_text())
    assert (found["newlines"], found["vocabulary"]) == ("drop", 3)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("text8", "--from {}/no", "argument --from: {}/no cannot be read"),
        ("wikitext103", "--from {}", "--from {} is no file: give the archive"),
        ("text8", "--from {}/x.zip", "x.zip lacks text8: give it as it was published"),
        ("text8", "--from {}/cut.zip", "cut.zip"),
        ("text8", "--from {}/other.zip", "the published one is"),
        ("wikitext103", "--from {}/x.zip", "--from {}/x.zip has md5"),
        ("ptb", "--from {}/ptb.zip", "ptb.train.txt, has md5"),
        ("text8", "--from {}/text8 --srcdict {}/few.txt", "lacks 2 of the text's 3 symbols"),
        ("text8", "--from {0}/x.zip --output {0}/x.zip/out", "--output {}/x.zip/out"),
        ("text8", "--mirror ftp://host", "text8.zip cannot be downloaded: ftp://host"),
    ],
)
def test_what_cannot_be_used_is_refused_and_leaves_nothing(prepare, tmp_path, name, options, named):
    (tmp_path / "x.zip").write_bytes(zipped({"text9": b""}))
    (tmp_path / "cut.zip").write_bytes(zipped({"text8": LETTERS})[:-30])
    (tmp_path / "other.zip").write_bytes(zipped({"text8": LETTERS[::-1]}))
    (tmp_path / "ptb.zip").write_bytes(zipped({**PTB, "ptb.train.txt": b"a\n"}))
    (tmp_path / "few.txt").write_text("a 1\n")
    (tmp_path / "text8").write_bytes(LETTERS)
    given(tmp_path, "ptb")
    words = options.format(tmp_path, tmp_path).split()
    assert refused(prepare(name, *words), named.format(tmp_path))
    assert not (tmp_path / "out").exists()


def test_another_vocabulary_is_refused(prepare, small, tmp_path):
    source = given(tmp_path, "wikitext103")
    small["wikitext103"] = dataclasses.replace(small["wikitext103"], vocabulary=11)
    result = prepare("wikitext103", "--from", source)
    assert refused(result, "a vocabulary of 4 symbols, the published one has 11")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("ascii_blanks", "words"),
    [
        (False, [["a", "b", "c"], ["d"], ["e"], ["f"]]),
        (True, [["a\u2423b", "c", "d", "e"], ["f"]]),
    ],
)
def test_what_separates_words_and_lines(ascii_blanks, words):
    stream = io.BytesIO("a\u00a0b\tc\rd\r e\nf".encode())
    assert list(_published.words_of_lines(stream, ascii_blanks)) == words


@pytest.mark.filterwarnings("ignore:overflow")
def test_offsets_beyond_two_gibibytes_are_mended(tmp_path):
    def offsets():
        index = MMapIndexedDataset.Index(str(tmp_path / "train.idx"))
        return [int(index[item][0]) for item in range(len(index))]

    # as fairseq-preprocess with several workers has them
    with MMapIndexedDataset.Index.writer(str(tmp_path / "train.idx"), np.uint32) as index:
        index.write([np.int32(2**28)] * 4)
    assert min(offsets()) < 0
    _binarize.mend_offsets(str(tmp_path / "train"))
    assert offsets() == [0, 2**30, 2**31, 3 * 2**30]
