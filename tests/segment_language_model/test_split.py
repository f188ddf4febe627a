"""The tokens of a binarized split, and its sentences in a random order."""

import os

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import make_builder

from fairseq_plugins.segment_language_model import split as split_module
from fairseq_plugins.segment_language_model.options import SegmentLanguageModelingConfig
from fairseq_plugins.segment_language_model.split import ShuffledSentences, load_tokens
from fairseq_plugins.segment_language_model.streams import RunningText, TokenStreams
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from tests.tiny import dictionary

PAD, EOS = 1, 2


def write(folder, name, sentences, impl="mmap"):
    path = str(folder / name)
    builder = make_builder(f"{path}.bin", impl=impl, vocab_size=20)
    for sentence in sentences:
        builder.add_item(torch.tensor(sentence, dtype=torch.int))
    builder.finalize(f"{path}.idx")
    return path


SENTENCES = [[4, 5, 2], [6, 2], [7, 8, 9, 2]]
JOINED = [4, 5, 2, 6, 2, 7, 8, 9, 2]


@pytest.mark.parametrize("impl", ["mmap", "lazy", "cached"])
def test_load_tokens_joins_sentences_and_numbered_parts(tmp_path, impl):
    path = write(tmp_path, "train", SENTENCES, impl)
    write(tmp_path, "train1", [[10, 2]], impl)
    tokens = load_tokens(path, dictionary(), impl)
    assert tokens.tolist() == JOINED
    assert isinstance(tokens, np.memmap) == (impl == "mmap")  # not read into memory
    assert load_tokens(path, dictionary(), impl, combine=True).tolist() == [*JOINED, 10, 2]


def cut_off(ending, length):
    """Return a file name's ending, and a function that changes the file's content."""
    return ending, lambda content: content[:length]


def overwrite(position):
    return ".idx", lambda content: content[:position] + b"\x77" + content[position + 1 :]


DAMAGED_INDEX = r"train has an index, .*train\.idx, that is cut short or damaged.*binarize the text"


@pytest.mark.parametrize(
    ("sentences", "damage", "message"),
    [
        ([[]], None, "train is empty: binarize a text"),
        ([[4, PAD, 2]], None, "holds <pad>, which fairseq takes for padding"),
        ([[4, 20, 2]], None, r"holds symbol number 20, but dict\.txt has only 20"),
        (SENTENCES, cut_off(".bin", 6), r"train is incomplete: .*train\.bin and .*; binarize the"),
        *((SENTENCES, cut_off(".idx", size), DAMAGED_INDEX) for size in (9, 20, 30, -1)),
        *((SENTENCES, overwrite(position), DAMAGED_INDEX) for position in (9, 17, 18, 25)),
    ],
)
def test_a_split_that_no_model_reads_is_refused(tmp_path, sentences, damage, message):
    path = write(tmp_path, "train", sentences)
    if damage is not None:
        ending, change = damage
        file = tmp_path / f"train{ending}"
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        load_tokens(path, dictionary())


def test_each_epoch_reads_the_next_of_several_folders(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder, sentence in zip(folders, SENTENCES, strict=False):
        folder.mkdir()
        write(folder, "train", [sentence])
    data = os.pathsep.join(map(str, folders))
    options = SegmentLanguageModelingConfig(data=data, dataset_impl="mmap", train_subset="train")
    task, texts = SegmentLanguageModelingTask(options, dictionary()), []
    for epoch in (1, 2, 3):
        task.load_dataset("train", epoch)
        texts.append(task.dataset("train").tokens.tolist())
    assert texts == [SENTENCES[0], SENTENCES[1], SENTENCES[0]]


# twelve different sentences, one of them empty
PARTS = [(*range(4, 4 + number), EOS) for number in range(12)]
WHOLE = np.array([token for part in PARTS for token in part])


def cut(tokens):
    """Split a text into its sentences."""
    ends = [number + 1 for number, token in enumerate(tokens) if token == EOS]
    return [tuple(tokens[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("scanned", [3, 2**24])
def test_shuffled_sentences_are_the_sentences_in_a_random_order(monkeypatch, scanned):
    monkeypatch.setattr(split_module, "SCANNED", scanned)
    orders = {tuple(PARTS)}
    for seed, epoch in [(1, 1), (1, 2), (2, 1)]:
        shuffled = ShuffledSentences(WHOLE, EOS, [seed, epoch])
        order = shuffled[0 : len(WHOLE)].tolist()
        assert sorted(cut(order)) == sorted(PARTS)
        orders.add(tuple(cut(order)))
        for begin in range(0, len(order), 7):
            for end in (begin, begin + 1, begin + 30, len(order) + 3):
                assert shuffled[begin:end].tolist() == order[begin:end]
    assert len(orders) == 4


def test_a_sentence_without_an_end_is_shuffled_too():
    tokens = WHOLE[:-1]
    orders = [ShuffledSentences(tokens, EOS, [1, e])[0 : len(tokens)] for e in range(20)]
    assert all(sorted(order) == sorted(tokens) for order in orders)
    assert len({order[-1] == EOS for order in orders}) == 2
    # one sentence cannot be shuffled
    with pytest.raises(ValueError, match="--shuffle-sentences: the training part is one sentence"):
        ShuffledSentences(np.array([4, 5, EOS]), EOS, [1, 1])


def test_streams_read_sentences_in_the_epochs_order():
    def read_streams(shuffled, epoch):
        ordered = RunningText(WHOLE, shuffled).ordered(EOS, 1, epoch)
        dataset = TokenStreams(ordered, dictionary(), 1, 5)
        return torch.cat([dataset[number]["target"] for number in range(len(dataset))]).tolist()

    assert read_streams(False, 1) == read_streams(False, 2) == WHOLE.tolist()
    assert sorted(cut(read_streams(True, 1))) == sorted(PARTS)
    assert read_streams(True, 1) == read_streams(True, 1) != read_streams(True, 2)
