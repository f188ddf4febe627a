"""Multi30k's texts, from made-up archives."""

import hashlib

import pytest

from tests.scripts.prepare.prepared import contents, lines, write_files
from tests.scripts.refusals import refused

LANGUAGES = ("en", "de", "fr")


def text(part, language):
    return f"{part} one {language}\n{part} two {language}\n"


@pytest.fixture
def words(tmp_path, corpora):
    """Write small archives; return the options that name them."""
    for source in corpora["multi30k"]["get"]:
        for name in source["texts"]:
            content = text(*name.split("."))
            write_files(tmp_path / "archives", {f"{name}.gz": content})
            source["texts"][name] = f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
    return ("--from", tmp_path / "archives", "--workers", 1)


def test_multi30k_is_written_as_text(prepare, words, tmp_path):
    assert prepare("multi30k", *words)[0] == 0
    written = contents(tmp_path / "out")
    names = {f"text/{part}.{code}" for part in ("train", "valid", "test") for code in LANGUAGES}
    assert set(written) == {*names, "preparation.json"}
    assert written["text/valid.fr"].decode() == text("val", "fr")
    write_files(tmp_path / "archives", {"val.en.gz": "changed"})
    result = prepare("multi30k", *words, "--output", tmp_path / "other")
    assert refused(result, "val.en")
    assert not (tmp_path / "other").exists()


def test_joined_languages_are_told_apart_by_marks(prepare, words, tmp_path):
    options = ("--unit", "subwords", "--bpe-size", 9, "--max-ratio", 9, "--joined")
    assert prepare("multi30k", *words, *options)[0] == 0
    out = tmp_path / "out"
    english = text("val", "en").splitlines(keepends=True)
    marked = [f"<2{code}> {line}" for code in ("de", "fr") for line in english]
    assert (out / "text/valid.en").read_text() == "".join(marked)
    assert (out / "text/valid.de").read_text() == text("val", "de") + text("val", "fr")
    assert len(lines(out / "bin", "train.en-de.de", "dict.de.txt")) == 4
