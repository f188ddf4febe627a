import dataclasses
import io
import re
from argparse import Namespace
from contextlib import contextmanager

import numpy as np
import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset

from fairseq_plugins.segment_language_model.streams import load_tokens
from scripts.prepare import _binarize
from scripts.prepare import lm1b as prepare_lm1b
from scripts.prepare import wikitext103 as prepare_wikitext103
from scripts.prepare._binarize import words_of_lines
from tests.scripts.prepare.preprocess_in_process import in_this_process, preprocess

SPLITS = ("train", "valid", "test")
# blanks at both ends, empty lines, <unk>, words alike in number, no newline at the end
TEXTS = {
    "train": " \n = Title = \n \n the cat <unk> the\tdog \n a a \u00e9t\u00e9 the \n\n zebra",
    "valid": " the bird <unk> \n \n",
    "test": "a bird and a fish\n",
}


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch):
    monkeypatch.setattr(_binarize, "child_process", in_this_process)


def data_set(**changes):
    splits = {f"wiki.{split}.tokens": split for split in SPLITS}
    values = {"splits": splits, "vocabulary": 10, **changes}
    return dataclasses.replace(prepare_wikitext103.WIKITEXT103, **values)


def binarize(tmp_path, texts=TEXTS, srcdict=None, **changes):
    source = tmp_path / "source"
    source.mkdir()
    for split, text in texts.items():
        (source / f"wiki.{split}.tokens").write_text(text, encoding="utf-8", newline="")
    folder = tmp_path / "partial" / "corpus"
    (folder / "bin").mkdir(parents=True)
    options = Namespace(srcdict=srcdict, workers=1)
    return folder, data_set(**changes).build(source, folder, options)


def lines(folder, split):
    dictionary = Dictionary.load(str(folder / "bin" / "dict.txt"))
    dataset = data_utils.load_indexed_dataset(str(folder / "bin" / split), dictionary)
    tokens = load_tokens(str(folder / "bin" / split), dictionary)
    assert tokens.tolist() == [int(token) for item in dataset for token in item]
    return [" ".join(dictionary[token] for token in item) for item in dataset]


def test_binarized_text_is_what_fairseq_preprocess_makes_of_the_original(tmp_path):
    folder, _ = binarize(tmp_path)
    words = ["--only-source", "--destdir", str(tmp_path / "theirs"), "--padding-factor", "1"]
    for split in SPLITS:
        words += [f"--{split}pref", str(tmp_path / "source" / f"wiki.{split}.tokens")]
    preprocess(words)
    for name in ["dict.txt", *(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx"))]:
        assert (folder / "bin" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


def test_each_line_ends_with_eos_and_unk_of_the_text_is_unk(tmp_path, capsys):
    folder, description = binarize(tmp_path)
    assert lines(folder, "train") == [
        "</s>",
        "= Title = </s>",
        "</s>",
        "the cat <unk> the dog </s>",
        "a a \u00e9t\u00e9 the </s>",
        "</s>",
        "zebra </s>",
    ]
    assert lines(folder, "valid") == ["the <unk> <unk> </s>", "</s>"]
    assert lines(folder, "test") == ["a <unk> <unk> a <unk> </s>"]
    assert description == {
        "vocabulary": 10,
        "splits": {
            "train": {"lines": 7, "tokens": 20, "unknown": 1},
            "valid": {"lines": 2, "tokens": 5, "unknown": 2},
            "test": {"lines": 1, "tokens": 6, "unknown": 3},
        },
    }
    printed = capsys.readouterr().out
    for split, number in [("train", 0), ("valid", 1), ("test", 3)]:
        assert f"{split}: {number} words are not in the dictionary: now <unk>\n" in printed


def test_only_the_corpus_is_left(tmp_path):
    folder, _ = binarize(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["bin"]
    assert [path.name for path in folder.parent.iterdir()] == ["corpus"]


def test_rare_words_are_unknown(tmp_path):
    folder, description = binarize(tmp_path, threshold=2, vocabulary=5)
    assert (folder / "bin" / "dict.txt").read_text() == "the 3\n= 2\na 2\n"
    assert lines(folder, "train")[3] == "the <unk> <unk> the <unk> </s>"
    assert description["splits"]["train"]["unknown"] == 6


def test_given_dictionary_is_used(tmp_path, capsys):
    srcdict = tmp_path / "given.txt"
    srcdict.write_text("bird 5\nthe 3\n")
    # its size is its own
    folder, description = binarize(tmp_path, srcdict=srcdict, vocabulary=99)
    assert (folder / "bin" / "dict.txt").read_text() == srcdict.read_text()
    assert lines(folder, "test") == ["<unk> bird <unk> <unk> <unk> </s>"]
    assert description["vocabulary"] == 4
    assert "test: 4 words are not in the dictionary: now <unk>\n" in capsys.readouterr().out


def test_file_that_is_no_dictionary_is_refused(tmp_path):
    srcdict = tmp_path / "given.txt"
    srcdict.write_text("bird\n")
    with pytest.raises(ValueError, match=rf"--srcdict {re.escape(str(srcdict))} is no dictionary"):
        binarize(tmp_path, srcdict=srcdict)


def test_another_vocabulary_is_refused_before_the_long_work(tmp_path, monkeypatch):
    monkeypatch.setattr(_binarize, "child_process", None)
    message = (
        "WikiText-103: the text has a vocabulary of 10 symbols, the published one has 11: figures "
        "would not compare with published ones, get the data anew, or give the dictionary that is "
        "meant with --srcdict"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        binarize(tmp_path, vocabulary=11)


def test_other_tokens_than_those_of_the_text_are_refused(tmp_path, monkeypatch):
    @contextmanager
    def lose_a_line(words, log):
        path = tmp_path / "partial" / "corpus" / "valid.txt"
        path.write_text(path.read_text().removesuffix("\n"))
        with in_this_process(words, log) as child:
            yield child

    monkeypatch.setattr(_binarize, "child_process", lose_a_line)
    message = (
        "fairseq-preprocess, valid: 1 lines, 4 tokens of a text of 2 lines, 5 tokens: use the "
        "fairseq version that this project pins"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        binarize(tmp_path)


def test_interrupted_work_leaves_no_log_and_failed_work_its_log(tmp_path, monkeypatch):
    @contextmanager
    def fail(words, log):
        log.touch()
        raise error
        yield

    monkeypatch.setattr(_binarize, "child_process", fail)
    for number, error in enumerate([KeyboardInterrupt(), ValueError("see the log")]):
        place = tmp_path / str(number)
        place.mkdir()
        with pytest.raises(type(error)):
            binarize(place)
        assert (place / "partial" / "preprocess.log").exists() == (number == 1)


def test_a_killed_run_that_ends_late_may_take_the_log_away(tmp_path, monkeypatch):
    @contextmanager
    def robbed(words, log):
        with in_this_process(words, log) as child:
            yield child
        log.unlink()

    monkeypatch.setattr(_binarize, "child_process", robbed)
    folder, _ = binarize(tmp_path)
    assert lines(folder, "test") == ["a <unk> <unk> a <unk> </s>"]


def test_unknown_words_are_counted_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(_binarize, "SCANNED", 2)
    _, description = binarize(tmp_path)
    assert [size["unknown"] for size in description["splits"].values()] == [1, 2, 3]


def test_large_vocabulary_takes_more_bytes(tmp_path):
    text = " ".join(f"w{number:05}" for number in range(66_000)) + "\n"
    texts = {**TEXTS, "train": text, "test": "w00000 w65999\n"}
    folder, _ = binarize(tmp_path, texts, vocabulary=66_002)
    assert lines(folder, "test") == ["w00000 w65999 </s>"]
    assert np.fromfile(folder / "bin" / "test.bin", dtype=np.uint32).tolist() == [4, 66_003, 2]


@pytest.mark.filterwarnings("ignore:overflow")
def test_offsets_beyond_two_gibibytes_are_mended(tmp_path):
    def offsets():
        index = MMapIndexedDataset.Index(str(tmp_path / "train.idx"))
        return [int(index[item][0]) for item in range(len(index))]

    # as fairseq-preprocess with several workers has them
    with MMapIndexedDataset.Index.writer(str(tmp_path / "train.idx"), np.uint32) as index:
        index.write([np.int32(2**28)] * 4)
    assert min(offsets()) < 0
    _binarize.mend_offsets(str(tmp_path / "train"))
    assert offsets() == [0, 2**30, 2**31, 3 * 2**30]


def test_offsets_are_mended(tmp_path, monkeypatch):
    mended = []
    monkeypatch.setattr(_binarize, "mend_offsets", mended.append)
    folder, _ = binarize(tmp_path)
    assert mended == [str(folder / "bin" / split) for split in SPLITS]


@pytest.mark.parametrize(
    ("ascii_blanks", "expected"),
    [
        (False, [["a", "b", "c"], ["d"], ["e"], ["f"]]),
        (True, [["a\u2423b", "c", "d", "e"], ["f"]]),
    ],
)
def test_what_separates_words_and_lines(ascii_blanks, expected):
    stream = io.BytesIO("a\u00a0b\tc\rd\r e\nf".encode())
    assert list(words_of_lines(stream, ascii_blanks)) == expected


@pytest.mark.parametrize("blank", ["\u00a0", "\u2003", "\u3000", "\u0085", "\u2028", "\x1f"])
def test_word_with_another_blank_stays_one_word_for_fairseq(tmp_path, blank):
    texts = {**TEXTS, "train": f"a{blank}b a{blank}b\n", "test": f"a{blank}b\n"}
    folder, _ = binarize(tmp_path, texts, vocabulary=3, ascii_blanks=True)
    assert (folder / "bin" / "dict.txt").read_text(encoding="utf-8") == "a\u2423b 2\n"
    assert lines(folder, "test") == ["a\u2423b </s>"]


def test_shards_of_one_billion_word_train_and_two_are_held_out():
    splits = prepare_lm1b.LM1B.splits
    assert [name for name, split in splits.items() if split != "train"] == [
        "news.en.heldout-00001-of-00050",
        "news.en.heldout-00000-of-00050",
    ]
    assert splits["news.en.heldout-00000-of-00050"] == "test"
    train = [name for name, split in splits.items() if split == "train"]
    assert len(train) == 99
    assert (train[0], train[-1]) == ("news.en-00001-of-00100", "news.en-00099-of-00100")
