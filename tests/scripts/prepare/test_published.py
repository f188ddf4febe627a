"""The published data sets, from small archives of their kind, given or downloaded."""

import hashlib
import io
from pathlib import PurePosixPath
from unittest.mock import Mock

import pytest
import requests
import urllib3

from tests.scripts.prepare.prepared import SPLITS, lines, read_json, tarred, write_files, zipped
from tests.scripts.refusals import refused

CHARACTERS = b"ab\n ab\n" * 100
LETTERS = b"ab ab a" * 100
TEXTS = {"train": "a\u00a0a\tb\r\ra <unk>\n".encode(), "valid": b"a c\n", "test": b"b\n"}
# two training shards, a rare word (<unk>), an unused heldout shard; unusual blanks, and characters
# that must not count as line ends
NEWS = {
    "news.en-00001-of-00100": "a a b\u00a0c\tb\ra\n".encode(),
    "news.en.heldout-00002-of-00050": b"zzz\n",
    "news.en.heldout-00000-of-00050": b"b\n",
    "news.en-00002-of-00100": "a\u2028b b\u00a0c b\u00a0c\n".encode(),
    "news.en.heldout-00001-of-00050": b"a c\n",
}
# the published files, and the number of symbols
FILES = {
    "enwik8": {"enwik8.zip": zipped({"enwik8": CHARACTERS})},
    "text8": {"text8.zip": zipped({"text8": LETTERS})},
    "wikitext103": {"wikitext-103-v1.zip": zipped({f"wiki.{p}.tokens": TEXTS[p] for p in TEXTS})},
    "ptb": {f"ptb.{split}.txt": text for split, text in TEXTS.items()},
    "lm1b": {"1-billion-word-language-modeling-benchmark-r13output.tar.gz": tarred(NEWS)},
}
VOCABULARIES = {"enwik8": 4, "text8": 3, "wikitext103": 4, "ptb": 4, "lm1b": 5}


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


def parts(text):
    return zip(SPLITS, (text[:500], text[500:600], text[600:]), strict=True)


# the items that fairseq reads
BYTES = {
    split: [" ".join([*map(str, line), "</s>"]) for line in part.rstrip(b"\n").split(b"\n")]
    for split, part in parts(CHARACTERS)
}
SYMBOLS = {split: [" ".join(part.decode().replace(" ", "_"))] for split, part in parts(LETTERS)}
WORDS = {
    "train": ["a a b </s>", "</s>", "a <unk> </s>"],
    "valid": ["a <unk> </s>"],
    "test": ["b </s>"],
}
NEWS_WORDS = {
    "train": ["a a b\u2423c <unk> a </s>", "<unk> b\u2423c b\u2423c </s>"],
    "valid": ["a <unk> </s>"],
    "test": ["<unk> </s>"],
}
ITEMS = {"enwik8": BYTES, "text8": SYMBOLS, "wikitext103": WORDS, "ptb": WORDS, "lm1b": NEWS_WORDS}
UNITS = {"enwik8": "bytes", "text8": "characters"}


@pytest.fixture
def prepare(prepare, monkeypatch, corpora):
    """Return a function that prepares a corpus whose published archives are the small ones."""
    monkeypatch.setattr(requests, "get", Mock(side_effect=AssertionError("it downloads")))
    for name, files in FILES.items():
        corpora[name]["vocabulary"] = VOCABULARIES[name]
        for source in corpora[name]["get"]:
            if "sum" in source:
                source["sum"] = md5(files[PurePosixPath(source["address"]).name])
            else:
                source["texts"] = {name: md5(CHARACTERS if name == "enwik8" else LETTERS)}
                corpora[name]["split"] = {"bytes": [500, 100, 100]}

    def run(name, *options):
        words = {"enwik8": ("--newlines", "eos"), "text8": ()}.get(name, ("--workers", 1))
        return prepare(name, *words, *options)

    return run


@pytest.fixture
def archives(tmp_path):
    """Return a function that writes the archives of a data set, and returns what --from takes."""

    def write(name):
        write_files(tmp_path / "archives", FILES[name])
        return tmp_path / "archives" / ("" if name == "ptb" else next(iter(FILES[name])))

    return write


@pytest.fixture
def serve(monkeypatch):
    """Return a function that lets each host have these files by name; it returns what is asked for.

    Hosts do not answer to https. Each transfer breaks after ``cut`` bytes.
    """

    def serve(files, cut=None):
        asked = []

        def get(url, headers, **options):
            if url.startswith("https:"):
                raise requests.ConnectionError("no answer")
            asked.append(PurePosixPath(url).name)
            content, response = files.get(asked[-1]), requests.Response()
            # one of the real hosts also rejects Python's user agent
            rejected = content is None or headers["User-Agent"].startswith("python")
            response.status_code = 404 if rejected else 200
            if not rejected:
                body, sizes = io.BytesIO(content[:cut]), {"Content-Length": str(len(content))}
                response.raw = urllib3.HTTPResponse(body, sizes, 200, preload_content=False)
            return response

        monkeypatch.setattr(requests, "get", get)
        return asked

    return serve


@pytest.mark.parametrize("name", ITEMS)
def test_a_data_set_is_binarized_with_the_published_symbols(
    prepare, archives, corpora, tmp_path, name
):
    out = tmp_path / "out"
    status, _, error = prepare(name, "--from", archives(name))
    assert (status, error) == (0, "")
    assert {split: lines(out / "bin", split) for split in SPLITS} == ITEMS[name]
    assert {path.name for path in out.iterdir()} - {"tokens"} == {"bin", "preparation.json"}
    units = read_json(out / "bin" / "units.json")
    assert units["unit"] == UNITS.get(name, "words")
    assert units["symbols"] == ({" ": "_"} if name == "text8" else {})
    description = read_json(out / "preparation.json")
    assert description["vocabulary"] == VOCABULARIES[name]
    for split, items in ITEMS[name].items():
        assert description["splits"][split]["tokens"] == len(" ".join(items).split())
        assert description["splits"][split]["unknown"] == " ".join(items).count("<unk>")
    corpora[name]["vocabulary"] = 11
    other = ("--from", archives(name), "--output", tmp_path / "other")
    assert refused(prepare(name, *other), f"{VOCABULARIES[name]} symbols", "11")
    if name == "enwik8":
        corpora[name]["vocabulary"] = VOCABULARIES[name]
        assert prepare(name, *other, "--newlines", "drop")[0] == 0
        (line,) = lines(tmp_path / "other" / "bin", "train")
        assert line.split() == [str(byte) for byte in CHARACTERS[:500] if byte != 10]
        assert read_json(tmp_path / "other" / "preparation.json")["vocabulary"] == 3


def test_words_are_written_as_text_alone(prepare, archives, tmp_path):
    assert prepare("lm1b", "--from", archives("lm1b"), "--unit", "plain")[0] == 0
    folder = tmp_path / "out" / "text"
    written = {split: (folder / f"{split}.txt").read_text("utf-8") for split in SPLITS}
    train = "a a b\u2423c b a\na\u2423b b\u2423c b\u2423c\n"
    assert written == {"train": train, "valid": "a c\n", "test": "b\n"}
    assert not (tmp_path / "out" / "bin").exists()


@pytest.mark.parametrize(
    ("name", "symbols", "first"),
    [("text8", "_ 3\nb 2\na 1\n", SYMBOLS["train"][0]), ("ptb", "b 2\n", "<unk> <unk> b </s>")],
)
def test_another_dictionary_is_used(prepare, archives, tmp_path, name, symbols, first):
    srcdict, source = tmp_path / "dict.txt", archives(name)
    srcdict.write_text(symbols)
    assert prepare(name, "--from", source, "--srcdict", srcdict)[0] == 0
    assert (tmp_path / "out/bin/dict.txt").read_text() == symbols
    assert lines(tmp_path / "out/bin", "train")[0] == first
    srcdict.write_bytes(b"\xff")
    assert refused(prepare(name, "--from", source, "--srcdict", srcdict), "is not a dictionary")


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("text8", "--from {}/x.zip", "x.zip lacks text8"),
        ("text8", "--from {}/cut.zip", "cut.zip"),
        ("text8", "--from {}/other.zip", "other.zip"),
        ("text8", "--from {}/text8 --srcdict {}/few.txt", "--srcdict"),
        ("wikitext103", "--from {}/x.zip", "--from {}/x.zip"),
        ("wikitext103", "--from {}", "--from {}"),
    ],
)
def test_what_is_not_published_is_refused_and_leaves_nothing(
    prepare, tmp_path, name, options, named
):
    files = {"x.zip": zipped({"text9": b""}), "cut.zip": zipped({"text8": LETTERS})[:-30]}
    # text8 is the plain text
    files |= {"other.zip": zipped({"text8": LETTERS[::-1]}), "few.txt": "a 1\n", "text8": LETTERS}
    write_files(tmp_path, files)
    words = options.replace("{}", str(tmp_path)).split()
    assert refused(prepare(name, *words), named.replace("{}", str(tmp_path)))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["enwik8", "ptb"])
def test_an_archive_that_broke_off_or_is_another_is_downloaded_again(
    prepare, serve, tmp_path, name
):
    out, files = tmp_path / "out", FILES[name]
    page, other = (dict.fromkeys(files, sent) for sent in (b"<html>", zipped({name: b"other"})))
    for sent, cut, named in ((files, 3, "--from"), (page, None, name), (other, None, name)):
        serve(sent, cut)
        assert refused(prepare(name), named)
        assert not out.exists()
    asked = serve(files)
    assert prepare(name)[0] == 0
    assert asked == list(files)
    assert lines(out / "bin", "test")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_archives_that_arrived_before_a_failure_are_not_downloaded_again(prepare, serve, tmp_path):
    files = FILES["ptb"]
    first, *others = files
    serve({first: files[first]})
    assert refused(prepare("ptb"), f"{others[0]} cannot be downloaded")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [first]
    asked = serve(files)
    assert prepare("ptb")[0] == 0
    assert asked == others
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
