import dataclasses
import re
from argparse import Namespace

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset

from fairseq_plugins.segment_language_model.streams import load_tokens
from scripts.prepare import _characters
from scripts.prepare import enwik8 as prepare_enwik8
from scripts.prepare import text8 as prepare_text8
from scripts.prepare._characters import check_newlines
from scripts.prepare._sources import Checksum
from tests.scripts.prepare.preprocess_in_process import preprocess

EOS = 2
SPLITS = ("train", "valid", "test")


def text_of_bytes(seed=1):
    """A text with all bytes, most of them alike in number, empty lines and splits within lines."""
    generator = np.random.default_rng(seed)
    text = bytes(generator.integers(256, size=3000, dtype=np.uint8))
    return bytes(range(256)) + text.replace(b"~", b"\n\n") + b"end"


def data_set_of(text, like=prepare_enwik8.ENWIK8, **changes):
    sizes = {"train": len(text) - 600, "valid": 300, "test": 300}
    values = {"sizes": sizes, "vocabulary": len(set(text)), **changes}
    return dataclasses.replace(like, checksums={like.member: Checksum("md5", "")}, **values)


def binarize(tmp_path, text, newlines, data_set=None, srcdict=None):
    (tmp_path / "source").write_bytes(text)
    folder = tmp_path / f"corpus-{newlines}"
    (folder / "bin").mkdir(parents=True)
    options = Namespace(srcdict=srcdict, newlines=newlines)
    description = (data_set or data_set_of(text)).build(tmp_path / "source", folder, options)
    return folder / "bin", description


def parts(text):
    return {"train": text[:-600], "valid": text[-600:-300], "test": text[-300:]}


def separated(text):
    return "\n".join(" ".join(map(str, line)) for line in text.split(b"\n"))


def decoded(folder, split, dictionary):
    """Symbols of a split, read as this project and as fairseq read them."""
    tokens = load_tokens(str(folder / split), dictionary)
    dataset = data_utils.load_indexed_dataset(str(folder / split), dictionary)
    assert tokens.tolist() == [int(token) for item in dataset for token in item]
    assert [len(item) for item in dataset] == dataset.sizes.tolist()
    return [dictionary[token] for token in tokens]


def item_lengths(folder, split):
    # the sizes are part of the memory map that the index closes at its end
    index = MMapIndexedDataset.Index(str(folder / f"{split}.idx"))
    return index.sizes.tolist()


def test_newlines_as_eos_are_what_fairseq_preprocess_makes(tmp_path):
    text = text_of_bytes()
    for split, part in parts(text).items():
        (tmp_path / split).write_text(separated(part), encoding="ascii")
    words = ["--only-source", "--destdir", str(tmp_path / "theirs"), "--padding-factor", "1"]
    for split in SPLITS:
        words += [f"--{split}pref", str(tmp_path / split)]
    preprocess(words)

    folder, description = binarize(tmp_path, text, "eos")
    for name in ["dict.txt", *(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx"))]:
        assert (folder / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in (tmp_path / "theirs").iterdir()
    } - {"preprocess.log"}
    assert description["vocabulary"] == len(set(text)) == 256


def test_newlines_as_eos_are_the_lines_of_the_text(tmp_path):
    text = text_of_bytes()
    folder, description = binarize(tmp_path, text, "eos")
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    for split, part in parts(text).items():
        # a last </s>, as each split ends within a line
        assert decoded(folder, split, dictionary) == [
            "</s>" if byte == 10 else str(byte) for byte in part + b"\n"
        ]
        assert description["splits"][split] == {"bytes": len(part), "tokens": len(part) + 1}


def test_split_that_ends_with_a_newline_gets_no_other(tmp_path):
    text = b"ab\n" * 400
    folder, description = binarize(tmp_path, text, "eos")
    assert description["splits"]["valid"]["tokens"] == 300
    assert item_lengths(folder, "valid") == [3] * 100


def test_text_without_newline_is_one_line(tmp_path):
    folder, _ = binarize(tmp_path, b"a" * 1000, "eos", data_set_of(b"a" * 1000))
    assert item_lengths(folder, "valid") == [301]


def test_dropped_newlines_leave_no_trace(tmp_path):
    text = text_of_bytes()
    folder, description = binarize(tmp_path, text, "drop")
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    for split, part in parts(text).items():
        symbols = [str(byte) for byte in part if byte != 10]
        assert decoded(folder, split, dictionary) == symbols
        assert description["splits"][split] == {"bytes": len(part), "tokens": len(symbols)}
    assert "10" not in dictionary
    assert description["vocabulary"] == len(dictionary) - 4 == 255


def test_letters_are_their_own_symbols_and_spaces_are_underscores(tmp_path):
    text = (b"the quick brown fox jumps over the lazy dog " * 300)[:12000]
    data_set = data_set_of(text, prepare_text8.TEXT8)
    folder, description = binarize(tmp_path, text, None, data_set)
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    for split, part in parts(text).items():
        assert "".join(decoded(folder, split, dictionary)) == part.decode().replace(" ", "_")
    assert description["vocabulary"] == len(dictionary) - 4 == 27
    # one item of the whole text would be copied whole at each access
    assert item_lengths(folder, "train") == [4096, 4096, 11400 - 2 * 4096]
    assert dictionary.symbols[4] == "_"


def test_pieces_are_joined(tmp_path, monkeypatch):
    text = text_of_bytes()
    whole, _ = binarize(tmp_path, text, "eos")
    (tmp_path / "pieces").mkdir()
    monkeypatch.setattr(_characters, "PIECE", 7)
    pieces, _ = binarize(tmp_path / "pieces", text, "eos")
    for path in whole.iterdir():
        assert (pieces / path.name).read_bytes() == path.read_bytes()


def test_symbol_that_training_lacks_has_a_place(tmp_path):
    text = b"aab" * 400 + b"c" * 600
    folder, _ = binarize(tmp_path, text, "drop")
    assert (folder / "dict.txt").read_text() == "97 800\n98 400\n99 0\n"
    assert decoded(folder, "test", Dictionary.load(str(folder / "dict.txt"))) == ["99"] * 300


def test_text_with_another_number_of_bytes_is_refused(tmp_path):
    data_set = data_set_of(b"ab" * 500)
    message = f"{tmp_path}/source: the text has 998 bytes, enwik8 has 1,000: get it anew"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        binarize(tmp_path, b"ab" * 499, "eos", data_set)


def test_another_vocabulary_is_refused(tmp_path):
    text = b"ab\n" * 400
    message = (
        "enwik8: the text has a vocabulary of 3 symbols, the published one has 205: "
        "figures would not compare with published ones, get the data anew"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        binarize(tmp_path, text, "eos", data_set_of(text, vocabulary=205))


@pytest.mark.parametrize("newlines", ["eos", "drop"])
def test_given_dictionary_is_used(tmp_path, newlines):
    srcdict = tmp_path / "given.txt"
    srcdict.write_text("120 9\n98 8\n97 7\n")
    folder, _ = binarize(tmp_path, b"ab\n" * 400, newlines, srcdict=srcdict)
    assert (folder / "dict.txt").read_text() == srcdict.read_text()
    tokens = np.fromfile(folder / "train.bin", dtype=np.uint16)
    assert tokens[:4].tolist() == ([6, 5, EOS, 6] if newlines == "eos" else [6, 5, 6, 5])


def test_large_dictionary_takes_more_bytes(tmp_path):
    srcdict = tmp_path / "given.txt"
    srcdict.write_text("".join(f"w{number} 1\n" for number in range(70_000)) + "97 1\n98 1\n")
    folder, _ = binarize(tmp_path, b"ab\n" * 400, "drop", srcdict=srcdict)
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    assert decoded(folder, "test", dictionary) == ["97", "98"] * 100


def test_dictionary_without_a_symbol_of_the_text_is_refused(tmp_path):
    srcdict = tmp_path / "given.txt"
    srcdict.write_text("97 7\n")
    message = (
        f"--srcdict {srcdict} lacks 2 of the text's 3 symbols, such as '98', '99': give a "
        "dictionary of this data set, or leave the option away for a new one"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        binarize(tmp_path, b"abc\n" * 300, "eos", srcdict=srcdict)


@pytest.mark.parametrize("content", [b"97\n", b"97 1\n97 1\n", b"\xff 1\n"])
def test_file_that_is_no_dictionary_is_refused(tmp_path, content):
    srcdict = tmp_path / "given.txt"
    srcdict.write_bytes(content)
    message = rf"^--srcdict {re.escape(str(srcdict))} is no dictionary of fairseq \(.+\): give the"
    with pytest.raises(ValueError, match=message):
        binarize(tmp_path, b"ab\n" * 400, "eos", srcdict=srcdict)


@pytest.mark.parametrize(
    ("newlines", "given"), [(None, "is missing"), ("keep", "keep is unknown"), ("", " is unknown")]
)
def test_newline_convention_must_be_chosen(newlines, given):
    message = (
        f"--newlines {given}: give 'drop' to leave newlines away, as the Transformer-XL code does, "
        "or 'eos' to make each one </s>, as the adaptive-span and all-attention code does; bits "
        "per character of the two do not compare"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_newlines(newlines)
