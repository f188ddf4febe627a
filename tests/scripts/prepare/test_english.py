"""The English corpus, from made-up archives."""

import hashlib

import pytest

from scripts.prepare._read import from_string
from scripts.prepare._split import draw_characters
from tests.scripts.prepare.prepared import write_files, zipped
from tests.scripts.refusals import refused

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


REVIEWED = '"it\'s $12,000," mr. x (of the u.s.) says...\nrated 1.85:1; 9%!'
TEXTS = {
    "brown/ca01": 'The jury said "no evidence", to Mr. Allen Jr.\n(It was 3/4): why?',
    **{f"movie_reviews/pos/cv{number:03}_1.txt": REVIEWED for number in range(3)},
    "state_union/1970-Nixon.txt": "The Nation's work--and ours.\nPlease.",
    "abc/science.txt 0": "Cafes at 5 degrees C\nSo it is.\nGoteborg",
    **{
        f"abc/rural.txt {first}": "\n".join(["Wheat\nIt rained.\nWool\nIt did not."] * 10)
        for first in range(0, 100, 20)
    },
}


@pytest.fixture
def archives(tmp_path, corpora):
    """Return a folder with small archives; none of the checksums are the published ones."""
    members = {
        "brown": {"ca01": BROWN, "README": b"left out"},
        "movie_reviews": {f"pos/cv{i:03}_1.txt": REVIEW for i in range(3)},
        "state_union": {"1970-Nixon.txt": SPEECH, "README": b"left out"},
        "abc": {"rural.txt": RURAL, "science.txt": SCIENCE, "README": b"left out"},
    }
    for source in corpora["english"]["get"]:
        name = source["address"].rpartition("/")[2].removesuffix(".zip")
        content = zipped(members[name], name)
        write_files(tmp_path / "archives", {f"{name}.zip": content})
        source["sum"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
    corpora["english"]["split"] = {"characters": 100}
    return tmp_path / "archives"


def test_documents_without_their_tokenisation_are_drawn_whole(archives, prepare, corpora, tmp_path):
    words = ("--from", archives)
    assert refused(prepare("english", *words), "text/train.txt has sha256")
    assert not (tmp_path / "out").exists()
    del corpora["english"]["written"]
    assert prepare("english", *words)[0] == 0
    parts = {path.stem: path.read_text() for path in (tmp_path / "out/text").iterdir()}
    assert all(len(part) > 100 for part in parts.values())
    drawn = [text for part in parts.values() for text in part.removesuffix("\n").split("\n\n")]
    assert sorted(drawn) == sorted(TEXTS.values())
    # whatever the order of the archives
    texts = [from_string(*text) for text in TEXTS.items()]
    assert draw_characters(texts, 100) == draw_characters(texts[::-1], 100)
