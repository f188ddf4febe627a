"""The five published data sets for language modeling, each from a small archive of its kind."""

import dataclasses
import hashlib
import importlib
import json
import shutil

import numpy as np
import pytest
from fairseq.data.indexed_dataset import MMapIndexedDataset

from scripts.prepare import _binarize, _published
from tests.scripts.prepare.prepared import (
    SPLITS,
    lines,
    refused,
    serve,
    tarred,
    write_files,
    zipped,
)

CHARACTERS = b"ab\n ab\n" * 100
LETTERS = b"ab ab a" * 100
TEXTS = {"train": "a\u00a0a\tb\r\ra <unk>\n".encode(), "valid": b"a c\n", "test": b"b\n"}
WORDS = {
    "train": ["a a b </s>", "</s>", "a <unk> </s>"],
    "valid": ["a <unk> </s>"],
    "test": ["b </s>"],
}
# two training shards, a rare word (<unk>), an unused heldout shard; unusual blanks, and characters
# that must not count as line ends
NEWS = {
    "news.en-00001-of-00100": "a a b\u00a0c\tb\ra\n".encode(),
    "news.en.heldout-00002-of-00050": b"zzz\n",
    "news.en.heldout-00000-of-00050": b"b\n",
    "news.en-00002-of-00100": "a\u2028b b\u00a0c b\u00a0c\n".encode(),
    "news.en.heldout-00001-of-00050": b"a c\n",
}
NEWS_WORDS = {
    "train": ["a a b\u2423c <unk> a </s>", "<unk> b\u2423c b\u2423c </s>"],
    "valid": ["a <unk> </s>"],
    "test": ["<unk> </s>"],
}
# the files on a mirror
FILES = {
    "enwik8": {"enwik8.zip": zipped({"enwik8": CHARACTERS})},
    "text8": {"text8.zip": zipped({"text8": LETTERS})},
    "wikitext103": {"wikitext-103-v1.zip": zipped({f"wiki.{p}.tokens": TEXTS[p] for p in TEXTS})},
    "ptb": {f"ptb.{split}.txt": text for split, text in TEXTS.items()},
    "lm1b": {"1-billion-word-language-modeling-benchmark-r13output.tar.gz": tarred(NEWS)},
}
VOCABULARIES = {"enwik8": 4, "text8": 3, "wikitext103": 4, "ptb": 4, "lm1b": 5}
UNITS = {"enwik8": "bytes", "text8": "characters"}


def parts(text):
    return zip(SPLITS, (text[:500], text[500:600], text[600:]), strict=True)


# the items that fairseq reads
ITEMS = {
    "enwik8": {
        split: [" ".join([*map(str, line), "</s>"]) for line in part.rstrip(b"\n").split(b"\n")]
        for split, part in parts(CHARACTERS)
    },
    "text8": {s: [" ".join(part.decode().replace(" ", "_"))] for s, part in parts(LETTERS)},
    **{"wikitext103": WORDS, "ptb": WORDS, "lm1b": NEWS_WORDS},
}


def digest(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


@pytest.fixture
def small():
    """Return the data sets' descriptions, adapted to the small archives at an unreachable URL."""
    made = {}
    for name, files in FILES.items():
        module = importlib.import_module(f"scripts.prepare.{name}")
        published = getattr(module, name.upper())
        changes = {"vocabulary": VOCABULARIES[name], "archives": []}
        for archive in published.archives:
            known = {"address": f"localhost:1/{archive.name}"}
            if archive.checksum:
                known["checksum"] = digest(files[archive.name])
            else:
                known["text_checksum"] = digest({"enwik8": CHARACTERS}.get(name, LETTERS))
                changes["sizes"] = (500, 100, 100)
            if name == "lm1b":
                known["members"] = [member for member in NEWS if "-00002-of-00050" not in member]
            changes["archives"].append(dataclasses.replace(archive, **known))
        made[name] = dataclasses.replace(published, **changes)
    return made


@pytest.fixture
def prepare(small, call, tmp_path):
    def prepare(name, *options):
        extra_options = {"enwik8": ("--newlines", "eos"), "text8": ()}.get(name, ("--workers", 1))
        description = f"{name}, data.\n\n    python -m scripts.prepare.{name}\n"
        words = ("--output", tmp_path / "out", *extra_options, *options)
        return call(lambda given: _published.run(small[name], description, given), *words)

    return prepare


def given(tmp_path, name):
    """Write the source for --from: an archive, or for PTB a folder."""
    folder = tmp_path / "given"
    write_files(folder, FILES[name])
    return folder if name == "ptb" else folder / next(iter(FILES[name]))


def read(tmp_path):
    return {split: lines(tmp_path / "out" / "bin", split) for split in SPLITS}


@pytest.mark.parametrize("name", FILES)
def test_the_data_of_an_archive_that_is_here(prepare, tmp_path, name):
    source, out = given(tmp_path, name), tmp_path / "out"
    status, _, error = prepare(name, "--from", source)
    assert (status, error) == (0, "")
    assert read(tmp_path) == ITEMS[name]
    assert sorted(path.name for path in out.iterdir()) == ["bin", "preparation.json"]
    units = json.loads((out / "bin" / "units.json").read_text())
    assert units["unit"] == UNITS.get(name, "words")
    assert units["symbols"] == ({" ": "_"} if name == "text8" else {})
    found = json.loads((out / "preparation.json").read_text())
    assert found["vocabulary"] == VOCABULARIES[name]
    for split, items in ITEMS[name].items():
        assert found["splits"][split]["tokens"] == len(" ".join(items).split())
        assert found["splits"][split]["unknown"] == " ".join(items).count("<unk>")
    # a second run does nothing
    shutil.rmtree(tmp_path / "given")
    assert prepare(name)[1].startswith("bin: complete\n")


def test_text_alone(prepare, tmp_path):
    assert prepare("lm1b", "--from", given(tmp_path, "lm1b"), "--text")[0] == 0
    folder = tmp_path / "out" / "text"
    written = {split: (folder / f"{split}.txt").read_text("utf-8") for split in SPLITS}
    train = "a a b\u2423c b a\na\u2423b b\u2423c b\u2423c\n"
    assert written == {"train": train, "valid": "a c\n", "test": "b\n"}
    assert not (tmp_path / "out" / "bin").exists()


@pytest.mark.parametrize("name", ["enwik8", "ptb"])
def test_the_data_of_a_mirror_also_after_others_that_broke_or_sent_something_else(
    prepare, tmp_path, name
):
    files = FILES[name]
    page, other = (dict.fromkeys(files, sent) for sent in (b"<html>", zipped({name: b"other"})))
    for sent, cut, named in ((files, 3, "--from"), (page, None, name), (other, None, name)):
        with serve(sent, cut) as (url, _):
            assert refused(prepare(name, "--mirror", url), named)
        assert not (tmp_path / "out").exists()
    with serve({}) as (empty, first), serve(files) as (url, second):
        status, _, error = prepare(name, "--mirror", empty, "--mirror", f"{url}/")
    assert (status, error) == (0, "")
    assert read(tmp_path) == ITEMS[name]
    assert first == second == list(files)
    assert not (tmp_path / "out" / "download").exists()


@pytest.mark.parametrize(("name", "text"), [("text8", "_ 3\nb 2\na 1\n"), ("ptb", "b 2\n")])
def test_a_given_dictionary_is_used(prepare, tmp_path, name, text):
    srcdict = tmp_path / "dict.txt"
    srcdict.write_text(text)
    assert prepare(name, "--from", given(tmp_path, name), "--srcdict", srcdict)[0] == 0
    assert (tmp_path / "out/bin/dict.txt").read_text() == text
    if name == "ptb":
        assert read(tmp_path)["train"][0] == "<unk> <unk> b </s>"
    else:
        assert read(tmp_path) == ITEMS[name]


def test_dropped_newlines(prepare, tmp_path):
    assert prepare("enwik8", "--from", given(tmp_path, "enwik8"), "--newlines", "drop")[0] == 0
    (line,) = read(tmp_path)["train"]
    assert line.split() == [str(byte) for byte in CHARACTERS[:500] if byte != 10]
    found = json.loads((tmp_path / "out" / "preparation.json").read_text())
    assert (found["newlines"], found["vocabulary"]) == ("drop", 3)


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("wikitext103", "--from {}", "--from {}/wikitext-103-v1.zip is not a file"),
        ("text8", "--from {}/x.zip", "x.zip lacks text8"),
        ("text8", "--from {}/cut.zip", "cut.zip"),
        ("text8", "--from {}/other.zip", "the published one is"),
        ("wikitext103", "--from {}/x.zip", "--from {}/x.zip has md5"),
        ("text8", "--from {}/text8 --srcdict {}/few.txt", "lacks 2 of the text's 3 symbols"),
        ("ptb", "--from {}/given --srcdict {}/text8", "--srcdict {}/text8 is not a dictionary"),
    ],
)
def test_what_cannot_be_used_is_refused_and_leaves_nothing(prepare, tmp_path, name, options, named):
    files = {"x.zip": zipped({"text9": b""}), "cut.zip": zipped({"text8": LETTERS})[:-30]}
    # text8 is the plain text
    files |= {"other.zip": zipped({"text8": LETTERS[::-1]}), "few.txt": "a 1\n", "text8": LETTERS}
    write_files(tmp_path, files)
    given(tmp_path, "ptb")
    words = options.replace("{}", str(tmp_path)).split()
    assert refused(prepare(name, *words), named.format(tmp_path))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["text8", "wikitext103"])
def test_another_vocabulary_is_refused(prepare, small, tmp_path, name):
    small[name] = dataclasses.replace(small[name], vocabulary=11)
    result = prepare(name, "--from", given(tmp_path, name))
    assert refused(result, f"{VOCABULARIES[name]} symbols, the published one has 11")
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore:overflow")
def test_offsets_beyond_two_gibibytes_are_mended(tmp_path):
    def offsets():
        index = MMapIndexedDataset.Index(str(tmp_path / "train.idx"))
        return [int(index[item][0]) for item in range(len(index))]

    # offsets as fairseq-preprocess writes them with several workers
    with MMapIndexedDataset.Index.writer(str(tmp_path / "train.idx"), np.uint32) as index:
        index.write([np.int32(2**28)] * 4)
    (tmp_path / "train.bin").write_bytes(bytes(4))
    assert min(offsets()) < 0
    _binarize.rewrite_index(str(tmp_path / "train"))
    assert offsets() == [0, 2**30, 2**31, 3 * 2**30]
