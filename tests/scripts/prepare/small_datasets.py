"""The five published data sets in small: archives, what is in them, and their scripts on them."""

import dataclasses
import hashlib
import importlib
import io
import re
import sys
import tarfile
import zipfile

from fairseq.data import Dictionary

from fairseq_plugins.segment_language_model.streams import load_tokens
from scripts.prepare import _binarize
from scripts.prepare._published import run
from scripts.prepare._sources import Checksum
from tests.scripts.prepare.preprocess_in_process import in_this_process

SPLITS = ("train", "valid", "test")
CHARACTERS = b"ab\n ab\n" * 100
LETTERS = b"ab ab a" * 100
TEXTS = {"train": b"a a b\n\na <unk>\n", "valid": b"a c\n", "test": b"b\n"}
WORDS = {"train": "a a b </s> </s> a <unk> </s>", "valid": "a <unk> </s>", "test": "b </s>"}
# two shards train, the rare word is <unk> and a heldout shard is left out
NEWS = {
    "news.en-00001-of-00100": b"a a b\n",
    "news.en.heldout-00002-of-00050": b"zzz\n",
    "news.en.heldout-00000-of-00050": b"b\n",
    "news.en-00002-of-00100": b"a b b\n",
    "news.en.heldout-00001-of-00050": b"a c\n",
}


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"folder/{name}", content)
    return buffer.getvalue()


def tarred(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"folder/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def checksum(like, content):
    return Checksum(like.algorithm, hashlib.new(like.algorithm, content).hexdigest())


WIKITEXT = {f"wiki.{split}.tokens": text for split, text in TEXTS.items()}
PTB = {f"ptb.{split}.txt": text for split, text in TEXTS.items()}
LM1B = "1-billion-word-language-modeling-benchmark-r13output.tar.gz"
SIZES = {"train": 500, "valid": 100, "test": 100}
# script: its constant, what a mirror has, what is checked, changes to the constant
SMALL = {
    "enwik8": (
        "ENWIK8",
        {"enwik8.zip": zipped({"enwik8": CHARACTERS})},
        {"enwik8": CHARACTERS},
        {"sizes": SIZES, "vocabulary": 4},
    ),
    "text8": (
        "TEXT8",
        {"text8.zip": zipped({"text8": LETTERS})},
        {"text8": LETTERS},
        {"sizes": SIZES, "vocabulary": 3},
    ),
    "wikitext103": (
        "WIKITEXT103",
        {"wikitext-103-v1.zip": zipped(WIKITEXT)},
        {"wikitext-103-v1.zip": zipped(WIKITEXT)},
        {"vocabulary": 4},
    ),
    "ptb": ("PTB", PTB, PTB, {"vocabulary": 4}),
    "lm1b": (
        "LM1B",
        {LM1B: tarred(NEWS)},
        {LM1B: tarred(NEWS)},
        {
            "vocabulary": 5,
            "splits": {
                "news.en-00001-of-00100": "train",
                "news.en-00002-of-00100": "train",
                "news.en.heldout-00001-of-00050": "valid",
                "news.en.heldout-00000-of-00050": "test",
            },
        },
    ),
}


def small_scripts(monkeypatch):
    """The scripts, with the small data sets, which have no mirror, and no process beside."""
    modules = {name: importlib.import_module(f"scripts.prepare.{name}") for name in SMALL}
    for name, (constant, _, checked, changes) in SMALL.items():
        published = getattr(modules[name], constant)
        checksums = {
            file: checksum(published.checksums[file], content) for file, content in checked.items()
        }
        small = dataclasses.replace(
            published, checksums=checksums, mirrors=(), disk_bytes=1000, **changes
        )
        monkeypatch.setattr(modules[name], constant, small)
    monkeypatch.setattr(_binarize, "child_process", in_this_process)
    return modules


def caller(scripts, monkeypatch, output, capsys):
    """A function that runs a script with --output; it returns status, stdout and stderr."""

    def call(name, *options):
        words = [f"prepare_{name}.py", "--output", output, *options]
        if name not in ("enwik8", "text8") and "--workers" not in options:
            words += ["--workers", "1"]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        module = scripts[name]
        status = run(getattr(module, SMALL[name][0]), module.__doc__)
        return status, *capsys.readouterr()

    return call


def refused(result, message):
    status, _, error = result
    return status == 1 and re.search(f"^error: {message}", error) and error.count("\n") == 1


def given(tmp_path, name):
    """What --from takes: an archive, or for PTB a folder."""
    folder = tmp_path / "given"
    folder.mkdir(exist_ok=True)
    for file, content in SMALL[name][1].items():
        (folder / file).write_bytes(content)
    return folder if name == "ptb" else folder / next(iter(SMALL[name][1]))


def options_of(name):
    return ("--newlines", "eos") if name == "enwik8" else ()


def symbols(folder, split):
    dictionary = Dictionary.load(str(folder / "bin" / "dict.txt"))
    return " ".join(
        dictionary[token] for token in load_tokens(str(folder / "bin" / split), dictionary)
    )


def expected_symbols(name):
    if name in ("wikitext103", "ptb"):
        return WORDS
    if name == "lm1b":
        return {"train": "a a b </s> a b b </s>", "valid": "a <unk> </s>", "test": "b </s>"}
    text = {"enwik8": CHARACTERS, "text8": LETTERS}[name]
    parts = {"train": text[:500], "valid": text[500:600], "test": text[600:]}
    if name == "text8":
        return {split: " ".join(part.decode().replace(" ", "_")) for split, part in parts.items()}
    return {
        split: " ".join("</s>" if byte == 10 else str(byte) for byte in part.rstrip(b"\n") + b"\n")
        for split, part in parts.items()
    }


def nothing_left(tmp_path):
    return not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
