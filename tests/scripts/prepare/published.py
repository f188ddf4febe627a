"""Small archives of the kind of the published data sets, which their commands then expect."""

import dataclasses
import hashlib
import importlib

from tests.scripts.prepare.prepared import tarred, write_files, zipped

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


def expect_small(monkeypatch, name, host="localhost:1", **changes):
    """Let a data set's command expect the small archive on a host; return its ``main``."""
    module = importlib.import_module(f"scripts.prepare.{name}")
    data_set = getattr(module, name.upper())
    archives = []
    for archive in data_set.archives:
        known = {"address": f"{host}/{archive.name}"}
        if archive.checksum:
            known["checksum"] = md5(FILES[name][archive.name])
        else:
            known["text_checksum"] = md5(CHARACTERS if name == "enwik8" else LETTERS)
            changes["sizes"] = (500, 100, 100)
        if name == "lm1b":
            known["members"] = [member for member in NEWS if "-00002-of-00050" not in member]
        archives.append(dataclasses.replace(archive, **known))
    changes = {"vocabulary": VOCABULARIES[name], "archives": archives, **changes}
    monkeypatch.setattr(module, name.upper(), dataclasses.replace(data_set, **changes))
    return module.main


def write_archives(folder, name):
    """Write the small archives of a data set; return what --from takes."""
    write_files(folder, FILES[name])
    return folder if name == "ptb" else folder / next(iter(FILES[name]))
