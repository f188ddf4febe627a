"""prepare.wmt14 on small archives like those of the workshop."""

import gzip
import hashlib
import json
import re
from dataclasses import replace

import pytest

from scripts.prepare import wmt14
from tests.scripts.prepare.prepared import tarred, write_files

OTHERS = {"en-de": "de", "en-fr": "fr"}
SENTENCES = ("First & last.", "The  second\u00a0one \tends here.", "A third <hl> & 3 > 2.")


def text(name, language):
    return "".join(f"{name} {language} sentence {number} sat.\n" for number in range(4))


def sgm(kind, language):
    lines = [f'<{kind}set setid="newstest2014" srclang="any">']
    for document, sentences in enumerate((SENTENCES[:2], SENTENCES[2:]), 1):
        lines += [f'<doc sysid="x" docid="d{document}" origlang="en">', "<p>"]
        lines += [f'<seg id="1">{language}: {sentence}</seg>' for sentence in sentences]
        lines += ["</p>", "</doc>"]
    return "\n".join([*lines, f"</{kind}set>\n"])


def text_name(archive):
    """Return the name of an archive's text without its version number."""
    return re.split(r"-v\d|\.", archive.members[0])[0]


def archives(pair):
    """Return the contents of the archives of a pair by name."""
    made, languages = {}, ("en", OTHERS[pair])
    for archive in (*wmt14.TRAIN[pair], *wmt14.TESTS):
        files = {"README": b"other"}
        for side, language in zip(("src", "ref"), languages, strict=True):
            if archive.name == wmt14.NEWSTEST2014.name:
                # sacrebleu finds these files by their full names
                name = f"../test-full/newstest2014-{languages[1]}en-{side}.{language}.sgm"
                data = sgm(side, language).encode()
            else:
                name = archive.members[0].format(other=languages[1], language=language)
                data = text(text_name(archive), language).encode()
            files[name] = gzip.compress(data) if name.endswith(".gz") else data
        made[archive.name] = tarred(files, "w:gz" if archive.name.endswith("gz") else "w")
    return made


@pytest.mark.parametrize("pair", OTHERS)
def test_the_texts_of_a_pair_are_prepared(call, monkeypatch, tmp_path, pair):
    made, out = archives(pair), tmp_path / "out"

    def small(archive):
        digest = f"sha256:{hashlib.sha256(made[archive.name]).hexdigest()}"
        return replace(archive, checksum=digest if archive.checksum else None)

    monkeypatch.setattr(wmt14, "TRAIN", {pair: tuple(map(small, wmt14.TRAIN[pair]))})
    monkeypatch.setattr(wmt14, "TESTS", tuple(map(small, wmt14.TESTS)))
    write_files(tmp_path / "archives", made)
    words = ("--output", out, "--bpe-size", 30, "--workers", 1, "--pair", pair)
    status, _, error = call(wmt14.main, *words, "--from", tmp_path / "archives")
    assert (status, error) == (0, "")
    names = ["europarl", "commoncrawl", "news-commentary"]
    if pair == "en-fr":
        names = ["europarl", "commoncrawl", "undoc", "news-commentary", "giga-fren"]
    for language in pair.split("-"):
        expected = "".join(text(name, language) for name in names)
        tokens = (out / "tokens" / f"train.{language}").read_text()
        # the hyphen of a name is a token of its own
        assert tokens.replace(" @-@ ", "-").replace(" .", ".") == expected
        references = out / "references"
        assert (references / f"test1.{language}").read_text() == text("newstest2013", language)
        assert (references / f"test.{language}").read_text() == "".join(
            f"{language}: {' '.join(sentence.split())}\n" for sentence in SENTENCES
        )
    description = json.loads((out / "preparation.json").read_text())
    parts = {part: sizes["pairs"] for part, sizes in description["parts"].items()}
    assert parts == {"train": 4 * len(names), "valid": 4, "test": 3, "test1": 4}
    assert (out / "bin" / f"test1.{pair}.en.idx").exists()
