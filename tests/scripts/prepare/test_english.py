"""The English corpus, from made-up archives."""

import hashlib

import pytest

from scripts.prepare import english
from tests.scripts.prepare.prepared import zipped

BROWN = (
    b"\n\n\tThe/at jury/nn said/vbd ``/`` no/at evidence/nn ''/'' ,/, to/in Mr./np Allen/np Jr./np "
    b"./.\n\n\n\t(/( It/pps was/bedz 3/4/cd )/) :/: why/wrb ?/. ?/.\n"
)
REVIEW = (
    b'" it\'s $12 , 000 , " mr . x ( of the u . s . ) says . . . \n'
    b"rated 1 . 85 : 1 ; 9 &nbsp ; % !\n"
)
SPEECH = "The Nation\u2019s work\u2014and  ours.\r\n \r\nPlease.\n".encode("big5")
RURAL = b"Wheat\nIt rained.\n\nWool\nIt did not.\n\n" * 50
SCIENCE = b"Caf\xe9s at 5\xb0C\r\nSo it is.\r\n\r\nG\xc3\xb6teborg\r\n"


@pytest.fixture
def archives(tmp_path, monkeypatch):
    """Return a folder with small archives; none of the checksums are the published ones."""
    folder = tmp_path / "archives"
    folder.mkdir()
    members = {
        "brown": {"ca01": BROWN, "README": b"left out"},
        "movie_reviews": {f"pos/cv{i:03}_1.txt": REVIEW for i in range(3)},
        "state_union": {"1970-Nixon.txt": SPEECH, "README": b"left out"},
        "abc": {"rural.txt": RURAL, "science.txt": SCIENCE, "README": b"left out"},
    }
    for name, files in members.items():
        content = zipped(files, name)
        (folder / f"{name}.zip").write_bytes(content)
        monkeypatch.setitem(english.ARCHIVES, name, hashlib.sha256(content).hexdigest())
    return folder


def test_english_undoes_tokenisation_and_keeps_documents_whole(
    archives, tmp_path, monkeypatch, call
):
    monkeypatch.setattr(english, "HELD_OUT", 100)
    words = ("--output", tmp_path / "data", "--from", archives)
    status, _, error = call(english.main, *words)
    assert (status, "test.txt has sha256" in error) == (1, True)
    texts = {}
    for name in english.ARCHIVES:
        texts |= english.documents(archives / f"{name}.zip")
    review = '"it\'s $12,000," mr. x (of the u.s.) says...\nrated 1.85:1; 9%!'
    assert texts == {
        "brown/ca01": 'The jury said "no evidence", to Mr. Allen Jr.\n(It was 3/4): why?',
        **{f"movie_reviews/pos/cv{number:03}_1.txt": review for number in range(3)},
        "state_union/1970-Nixon.txt": "The Nation's work--and ours.\nPlease.",
        "abc/science.txt 0": "Cafes at 5 degrees C\nSo it is.\nGoteborg",
        **{
            f"abc/rural.txt {first}": "\n".join(["Wheat\nIt rained.\nWool\nIt did not."] * 10)
            for first in range(0, 100, 20)
        },
    }
    parts = english.draw(texts)
    assert parts == english.draw(dict(reversed(texts.items())))
    assert all(len(parts[part]) > 100 for part in english.TEXTS)
    drawn = [text for part in parts.values() for text in part.removesuffix("\n").split("\n\n")]
    assert sorted(drawn) == sorted(texts.values())
    for name, text in parts.items():
        monkeypatch.setitem(english.TEXTS, name, hashlib.sha256(text.encode()).hexdigest())
    assert call(english.main, *words)[0] == 0
    assert {path.name: path.read_text() for path in (tmp_path / "data").iterdir()} == parts
    assert "complete" in call(english.main, *words)[1]
