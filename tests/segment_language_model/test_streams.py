"""Streams over a split predict every token once, in order, from its true predecessor."""

import itertools
import os
import sys

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import make_builder

from fairseq_plugins.segment_language_model import streams as streams_module
from fairseq_plugins.segment_language_model.recurrence import StreamIterator
from fairseq_plugins.segment_language_model.streams import (
    Jitter,
    RunningText,
    ShuffledSentences,
    TokenStreams,
    load_tokens,
    longest_segment,
)
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests.tiny import dictionary, text

PAD, EOS = 1, 2
LAYOUTS = [
    (length, streams, workers)
    for length in (1, 10, 97)
    for streams in (1, 3, 8)
    for workers in (1, 2)
    if streams * workers <= length
]


@pytest.mark.parametrize(("length", "streams", "workers"), LAYOUTS)
@pytest.mark.parametrize(
    ("segment", "context", "jitter"),
    [
        *((segment, context, None) for segment in (1, 7, 1000) for context in (0, 5)),
        *((9, context, Jitter(4, seed=1, epoch=3)) for context in (0, 5)),
    ],
)
def test_every_token_is_predicted_once_from_the_one_before(
    length, streams, workers, segment, context, jitter
):
    """With extended context, segments also read the tokens before them, without predicting them."""
    tokens = text(length)
    whole = [EOS, *tokens.tolist()]
    dataset = TokenStreams(tokens, dictionary(), streams * workers, segment, context, jitter=jitter)
    walks = [StreamIterator(dataset, workers, worker).next_epoch_itr() for worker in range(workers)]
    predicted = {stream: [] for stream in range(streams * workers)}
    for number, batches in enumerate(zip(*walks, strict=True)):
        # on all workers, a segment's batches are as wide as its longest stream
        width = dataset.num_tokens(number * dataset.num_streams) + context
        for worker, batch in enumerate(batches):
            first = number * dataset.num_streams + worker * streams
            assert batch["id"].tolist() == list(range(first, first + streams))
            assert batch["net_input"]["start"] == dataset.segment_start(number)
            scored = batch["target"].ne(PAD).sum(dim=1).tolist()
            assert (batch["stream_tokens"], batch["ntokens"]) == (scored, sum(scored))
            for row, stream in enumerate(range(worker * streams, (worker + 1) * streams)):
                begin, end = dataset.segment_bounds(number, stream)
                assert begin - dataset.segment_bounds(0, stream)[0] == sum(predicted[stream])
                before = min(begin, context) if end > begin else 0
                read = before + end - begin
                assert batch["start_indices"][row] == before
                assert batch["net_input"]["src_lengths"][row] == read
                padding = [PAD] * (width - read)
                source = batch["net_input"]["src_tokens"][row].tolist()
                assert source == whole[begin - before : end] + padding
                target = batch["target"][row].tolist()
                assert target == [PAD] * before + whole[begin + 1 : end + 1] + padding
                predicted[stream].append(end - begin)
    lengths = [sum(of_stream) for of_stream in predicted.values()]
    assert sum(lengths) == length
    assert max(lengths) - min(lengths) <= 1
    # streams are consecutive parts of the text
    assert dataset.segment_bounds(0, 0)[0] == 0
    ends = [dataset.segment_bounds(dataset.num_segments - 1, s)[1] for s in range(len(lengths))]
    assert ends == list(itertools.accumulate(lengths))
    if jitter is None:
        assert all(size == segment for size in predicted[0][:-1])
        assert 0 < predicted[0][-1] <= segment
    elif length > 50 * streams * workers:
        assert len(set(predicted[0])) > 2


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
def test_load_tokens_joins_the_sentences_and_numbered_parts_when_asked(tmp_path, impl):
    path = write(tmp_path, "train", SENTENCES, impl)
    write(tmp_path, "train1", [[10, 2]], impl)
    tokens = load_tokens(path, dictionary(), impl)
    assert tokens.tolist() == JOINED
    assert isinstance(tokens, np.memmap) == (impl == "mmap")  # not read into memory
    assert load_tokens(path, dictionary(), impl, combine=True).tolist() == [*JOINED, 10, 2]


@pytest.fixture
def unraisable(monkeypatch):
    """Collect exceptions from the deletion of objects, which Python can only print."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: found.append(error.exc_value))
    return found


def cut_off(ending, length):
    """Return a file name's ending, and a function that changes the file's content."""
    return ending, lambda content: content[:length]


def overwrite(place):
    return ".idx", lambda content: content[:place] + b"\x77" + content[place + 1 :]


DAMAGED_INDEX = r"train has an index, .*train\.idx, that is cut short or damaged.*binarize the text"


@pytest.mark.parametrize(
    ("sentences", "damage", "message"),
    [
        ([], None, "train is empty: binarize a text"),
        ([[]], None, "train is empty: binarize a text"),
        ([[4, PAD, 2]], None, "holds <pad>, which fairseq takes for padding"),
        ([[4, 20, 2]], None, r"holds symbol number 20, but dict\.txt has only 20"),
        (SENTENCES, cut_off(".bin", 0), r"train is empty: binarize a text"),
        (SENTENCES, cut_off(".bin", 6), r"train is incomplete: .*train\.bin and .*; binarize the"),
        *((SENTENCES, cut_off(".idx", size), DAMAGED_INDEX) for size in (0, 5, 9, 20, 30, -1)),
        *((SENTENCES, overwrite(place), DAMAGED_INDEX) for place in (9, 17, 18, 25)),
    ],
)
def test_a_split_that_no_model_reads_is_refused(tmp_path, sentences, damage, message, unraisable):
    path = write(tmp_path, "train", sentences)
    if damage is not None:
        ending, change = damage
        file = tmp_path / f"train{ending}"
        file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=message):
        load_tokens(path, dictionary())
    # fairseq's reader fails to close a file whose header is incomplete
    assert unraisable == [] or os.path.getsize(f"{path}.idx") < 9


def test_each_epoch_reads_the_next_of_several_folders(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder, sentence in zip(folders, SENTENCES, strict=False):
        folder.mkdir()
        write(folder, "train", [sentence])
    data = os.pathsep.join(map(str, folders))
    options = SegmentLanguageModelingConfig(data=data, dataset_impl="mmap", train_subset="train")
    task, read = SegmentLanguageModelingTask(options, dictionary()), []
    for epoch in (1, 2, 3):
        task.load_dataset("train", epoch)
        read.append(task.dataset("train").tokens.tolist())
    assert read == [SENTENCES[0], SENTENCES[1], SENTENCES[0]]


def test_a_missing_split_is_named_and_a_pipe_is_not_waited_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data at .*valid\.bin: name the folder"):
        load_tokens(str(tmp_path / "valid"), dictionary())
    path = write(tmp_path, "train", SENTENCES)
    os.remove(f"{path}.idx")
    os.mkfifo(f"{path}.idx")
    with pytest.raises(ValueError, match="it is not a file"):
        load_tokens(path, dictionary())


# twelve different sentences, one of them empty
PARTS = [(*range(4, 4 + number), EOS) for number in range(12)]
WHOLE = np.array([token for part in PARTS for token in part])


def cut(tokens):
    """Split a text into its sentences."""
    ends = [place + 1 for place, token in enumerate(tokens) if token == EOS]
    return [tuple(tokens[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("scanned", [3, 2**24])
def test_shuffled_sentences_are_the_sentences_in_a_random_order(monkeypatch, scanned):
    monkeypatch.setattr(streams_module, "SCANNED", scanned)
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


@pytest.mark.parametrize("tokens", [[4, 5], [4, 5, EOS]])
def test_one_sentence_cannot_be_shuffled(tokens):
    with pytest.raises(ValueError, match="--shuffle-sentences: the training part is one sentence"):
        ShuffledSentences(np.array(tokens), EOS, [1, 1])


def test_streams_read_the_sentences_in_the_order_of_the_epoch():
    def read(shuffled, epoch):
        ordered = RunningText(WHOLE, shuffled).ordered(EOS, 1, epoch)
        dataset = TokenStreams(ordered, dictionary(), 4, 5)
        items = [dataset[number] for number in range(len(dataset))]
        items.sort(key=lambda item: (item["id"] % 4, item["id"]))
        predicted = torch.cat([item["target"] for item in items]).tolist()
        assert torch.cat([item["source"] for item in items]).tolist() == [EOS, *predicted[:-1]]
        return predicted

    assert read(False, 1) == read(False, 2) == WHOLE.tolist()
    assert sorted(cut(read(True, 1))) == sorted(PARTS)
    assert read(True, 1) == read(True, 1) != read(True, 2)


# segments of random lengths (--segment-jitter)


def test_lengths_are_drawn_as_in_the_published_code():
    starts = Jitter(5, seed=1, epoch=1).draw_starts(2_000_000, 70)
    lengths = np.diff(starts)
    assert starts[0] == 0
    assert starts[-2] < 2_000_000 <= starts[-1]
    assert 5 <= lengths.min() < 30
    assert lengths.max() == 85
    assert longest_segment(70, 5) == 85
    halved = lengths < 52
    assert halved.mean() == pytest.approx(0.05, abs=0.005)
    # lengths are rounded down, and limited to 70 plus three standard deviations
    for some, around in ((lengths[~halved], 69.5), (lengths[halved], 34.5)):
        assert some.mean() == pytest.approx(around, abs=0.3)
        assert some.std() == pytest.approx(5, abs=0.3)


@pytest.mark.parametrize(("length", "segment", "fewest"), [(1, 8, 5), (40, 3, 3), (500, 8, 5)])
def test_segments_are_neither_too_short_nor_too_long(length, segment, fewest):
    starts = Jitter(9, seed=1, epoch=1).draw_starts(length, segment)
    lengths = np.diff(starts)
    assert starts[-2] < length <= starts[-1]
    assert lengths.min() >= fewest
    assert lengths.max() <= segment + 27


@pytest.mark.parametrize(("split", "jitter"), [("train", (4, 3, 1)), ("valid", None)])
def test_only_training_has_segments_of_random_lengths(split, jitter, tmp_path):
    write(tmp_path, split, [text(97).tolist()])
    options = {"data": str(tmp_path), "train_subset": "train", "dataset_impl": "mmap"}
    cfg = SegmentLanguageModelingConfig(**options, tokens_per_sample=9, segment_jitter=4)
    task = SegmentLanguageModelingTask(cfg, dictionary())
    task.load_dataset(split, 1)
    walk = task.get_batch_iterator(task.dataset(split), max_sentences=2, seed=3, epoch=1)
    assert walk.dataset.jitter == jitter
