"""WikiText-103, PTB and One Billion Word, from small archives."""

import json
import shutil

import pytest

from tests.scripts.prepare.prepared import SPLITS, lines, refused
from tests.scripts.prepare.published import VOCABULARIES, expect_small, write_archives

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


@pytest.fixture
def prepare(call, tmp_path, monkeypatch):
    def prepare(name, *options, **changes):
        main = expect_small(monkeypatch, name, **changes)
        return call(main, "--output", tmp_path / "out", "--workers", 1, *options)

    return prepare


@pytest.mark.parametrize("name", ["wikitext103", "ptb", "lm1b"])
def test_words_of_an_archive_are_binarized_once(prepare, tmp_path, name):
    source, out = write_archives(tmp_path / "archives", name), tmp_path / "out"
    status, _, error = prepare(name, "--from", source)
    assert (status, error) == (0, "")
    expected = NEWS_WORDS if name == "lm1b" else WORDS
    assert {split: lines(out / "bin", split) for split in SPLITS} == expected
    assert sorted(path.name for path in out.iterdir()) == ["bin", "preparation.json"]
    assert json.loads((out / "bin" / "units.json").read_text())["unit"] == "words"
    description = json.loads((out / "preparation.json").read_text())
    assert description["vocabulary"] == VOCABULARIES[name]
    for split, items in expected.items():
        assert description["splits"][split]["tokens"] == len(" ".join(items).split())
        assert description["splits"][split]["unknown"] == " ".join(items).count("<unk>")
    # a second run does nothing
    shutil.rmtree(tmp_path / "archives")
    assert prepare(name)[1].startswith("bin: complete\n")


def test_words_are_written_as_text_alone(prepare, tmp_path):
    source = write_archives(tmp_path / "archives", "lm1b")
    assert prepare("lm1b", "--from", source, "--text")[0] == 0
    folder = tmp_path / "out" / "text"
    written = {split: (folder / f"{split}.txt").read_text("utf-8") for split in SPLITS}
    train = "a a b\u2423c b a\na\u2423b b\u2423c b\u2423c\n"
    assert written == {"train": train, "valid": "a c\n", "test": "b\n"}
    assert not (tmp_path / "out" / "bin").exists()


def test_words_of_another_dictionary(prepare, tmp_path):
    srcdict = tmp_path / "dict.txt"
    srcdict.write_text("b 2\n")
    source = write_archives(tmp_path / "archives", "ptb")
    assert prepare("ptb", "--from", source, "--srcdict", srcdict)[0] == 0
    assert (tmp_path / "out/bin/dict.txt").read_text() == "b 2\n"
    assert lines(tmp_path / "out/bin", "train")[0] == "<unk> <unk> b </s>"
    srcdict.write_bytes(b"\xff")
    assert refused(prepare("ptb", "--from", source, "--srcdict", srcdict), "--srcdict")


def test_another_number_of_words_is_refused(prepare, tmp_path):
    source = write_archives(tmp_path / "archives", "wikitext103")
    assert refused(prepare("wikitext103", "--from", source, vocabulary=11), "4 symbols", "11")
    assert not (tmp_path / "out").exists()
