"""Streams over a split: every token once, in order, with its true predecessor."""

import os
import sys

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder, make_builder

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
    for length in (1, 10, 97, 100)
    for streams in (1, 2, 3, 8)
    for workers in (1, 2)
    if streams * workers <= length
]


@pytest.mark.parametrize(("length", "streams", "workers"), LAYOUTS)
@pytest.mark.parametrize("segment", [1, 7, 64, 1000])
def test_every_token_is_predicted_once_from_the_one_before(length, streams, workers, segment):
    tokens = text(length)
    dataset = TokenStreams(tokens, dictionary(), streams * workers, segment)
    rows = {stream: ([], []) for stream in range(streams * workers)}
    batches = dataset.batches(workers)
    for number, batch in enumerate(batches):
        collated = dataset.collater([dataset[i] for i in batch])
        worker = number % workers
        assert [i % dataset.num_streams for i in batch] == list(
            range(worker * streams, (worker + 1) * streams)
        )
        assert collated["ntokens"] == int((collated["target"] != PAD).sum())
        assert collated["ntokens"] == sum(dataset.num_tokens(i) for i in batch)
        # all workers' batches of a segment are alike in width, and none is empty
        widest = max(
            dataset.num_tokens(i)
            for i in range(len(dataset))[number // workers * dataset.num_streams :][
                : dataset.num_streams
            ]
        )
        assert collated["target"].shape == (streams, widest)
        for row, index in enumerate(batch):
            keep = collated["target"][row] != PAD
            source, target = rows[index % dataset.num_streams]
            source += collated["net_input"]["src_tokens"][row][keep].tolist()
            target += collated["target"][row][keep].tolist()
            # padding stands on the right only, and alike on both sides
            assert keep.tolist() == sorted(keep.tolist(), reverse=True)
            assert torch.equal(collated["net_input"]["src_tokens"][row] != PAD, keep)
    predicted = [token for _, target in rows.values() for token in target]
    read = [token for source, _ in rows.values() for token in source]
    assert predicted == tokens.tolist()
    assert read == [EOS, *tokens.tolist()[:-1]]
    lengths = [len(target) for _, target in rows.values()]
    assert max(lengths) - min(lengths) <= 1
    assert len(batches) == dataset.num_segments * workers == -(-max(lengths) // segment) * workers


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
def test_load_tokens_joins_the_sentences(tmp_path, impl):
    path = write(tmp_path, "train", SENTENCES, impl)
    assert load_tokens(path, dictionary(), impl).tolist() == JOINED


def test_load_tokens_appends_numbered_parts_when_asked(tmp_path):
    path = write(tmp_path, "train", SENTENCES)
    write(tmp_path, "train1", [[10, 2]])
    assert load_tokens(path, dictionary()).tolist() == JOINED
    assert load_tokens(path, dictionary(), combine=True).tolist() == [*JOINED, 10, 2]


def test_memory_mapped_tokens_stay_on_disk(tmp_path):
    path = write(tmp_path, "train", SENTENCES)
    assert isinstance(load_tokens(path, dictionary()), np.memmap)


def test_a_missing_split_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data at .*valid\.bin: name the folder"):
        load_tokens(str(tmp_path / "valid"), dictionary())


@pytest.mark.parametrize("sentences", [[], [[]]])
def test_an_empty_split_is_refused(tmp_path, sentences):
    builder = MMapIndexedDatasetBuilder(str(tmp_path / "valid.bin"))
    for sentence in sentences:
        builder.add_item(torch.tensor(sentence, dtype=torch.int))
    builder.finalize(str(tmp_path / "valid.idx"))
    with pytest.raises(ValueError, match=r"the split .*valid is empty: binarize a text"):
        load_tokens(str(tmp_path / "valid"), dictionary())


def test_a_split_that_is_cut_short_is_refused(tmp_path):
    path = write(tmp_path, "train", SENTENCES)
    with open(f"{path}.bin", "r+b") as file:
        file.truncate(6)
    with pytest.raises(ValueError, match=r"train is incomplete: .*train\.bin and .* differ"):
        load_tokens(path, dictionary())


@pytest.fixture
def unraisable(monkeypatch):
    """What an object could not raise as it was deleted, which Python prints."""
    found = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: found.append(error.exc_value))
    return found


@pytest.mark.parametrize("length", [0, 5, 9, 20, 30, -1])
def test_an_index_that_is_cut_short_is_refused(tmp_path, length, unraisable):
    path = write(tmp_path, "train", SENTENCES)
    with open(f"{path}.idx", "r+b") as file:
        file.truncate(length if length >= 0 else os.path.getsize(f"{path}.idx") + length)
    with pytest.raises(ValueError, match=r"train has an index, .*train\.idx, that is cut short"):
        load_tokens(path, dictionary())
    assert length < 9 or unraisable == []


@pytest.mark.parametrize("place", [9, 17, 18, 25])
def test_a_damaged_start_of_an_index_is_refused(tmp_path, place, unraisable):
    path = write(tmp_path, "train", SENTENCES)
    with open(f"{path}.idx", "r+b") as file:
        file.seek(place)
        file.write(b"\x77")
    with pytest.raises(ValueError, match=r"train has an index, .*train\.idx, that is cut short"):
        load_tokens(path, dictionary())
    assert unraisable == []


def test_an_index_that_is_a_pipe_is_refused(tmp_path):
    path = write(tmp_path, "train", SENTENCES)
    os.remove(f"{path}.idx")
    os.mkfifo(f"{path}.idx")
    with pytest.raises(ValueError, match=r"cut short or damaged \(it is no file\)"):
        load_tokens(path, dictionary())


def test_padding_in_the_text_is_refused(tmp_path):
    path = write(tmp_path, "train", [[4, PAD, 2]])
    with pytest.raises(ValueError, match="holds <pad>, which fairseq takes for padding"):
        load_tokens(path, dictionary())


def test_symbols_beyond_the_dictionary_are_refused(tmp_path):
    path = write(tmp_path, "train", [[4, 20, 2]])
    with pytest.raises(ValueError, match=r"holds symbol number 20, but dict\.txt has only 20"):
        load_tokens(path, dictionary())


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("segment", [1, 4, 50])
def test_extended_context_is_the_text_before_and_is_not_predicted(streams, segment):
    tokens = text(45)
    dataset = TokenStreams(tokens, dictionary(), streams, segment, extended_context=5)
    whole = [EOS, *tokens.tolist()]
    predicted = {}
    for batch in dataset.batches(1):
        collated = dataset.collater([dataset[i] for i in batch])
        scored = collated["target"] != PAD
        assert collated["ntokens"] == int(scored.sum())
        assert collated["stream_tokens"] == scored.sum(dim=1).tolist()
        for row, index in enumerate(batch):
            begin, end = dataset.segment_bounds(*divmod(index, streams))
            context = min(begin, 5) if end > begin else 0
            assert collated["start_indices"][row] == context
            length = context + end - begin
            assert collated["net_input"]["src_lengths"][row] == length
            source = collated["net_input"]["src_tokens"][row].tolist()
            assert source[:length] == whole[begin - context : end]
            target = collated["target"][row].tolist()
            assert target[:context] == [PAD] * context
            assert set(target[length:]) <= {PAD}
            predicted[begin] = target[context:length]
    assert [t for begin in sorted(predicted) for t in predicted[begin]] == tokens.tolist()


# twelve sentences that can be told apart, one of them empty
PARTS = [(*range(4, 4 + number), EOS) for number in range(12)]
WHOLE = np.array([token for part in PARTS for token in part])


def cut(tokens):
    """The sentences of a text."""
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


def test_streams_of_shuffled_sentences_have_every_token_once_from_the_one_before():
    def pairs(shuffled, epoch):
        ordered = RunningText(WHOLE, shuffled).ordered(EOS, 1, epoch)
        dataset = TokenStreams(ordered, dictionary(), 4, 5)
        items = [dataset[number] for number in range(len(dataset))]
        items.sort(key=lambda item: (item["id"] % 4, item["id"]))
        read = [token for item in items for token in item["source"].tolist()]
        predicted = [token for item in items for token in item["target"].tolist()]
        assert read == [EOS, *predicted[:-1]]
        return predicted

    assert pairs(False, 1) == pairs(False, 2) == WHOLE.tolist()
    assert sorted(cut(pairs(True, 1))) == sorted(PARTS)
    assert pairs(True, 1) == pairs(True, 1) != pairs(True, 2)


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
    # rounded down, and cut off three deviations above 70
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


@pytest.mark.parametrize(("streams", "workers", "context"), [(1, 1, 0), (3, 2, 0), (4, 1, 5)])
def test_segments_of_random_lengths_predict_every_token_once(streams, workers, context):
    tokens = text(211)
    jitter = Jitter(4, seed=1, epoch=3)
    dataset = TokenStreams(tokens, dictionary(), streams * workers, 9, context, jitter=jitter)
    walks = [StreamIterator(dataset, workers, worker).next_epoch_itr() for worker in range(workers)]
    read, predicted = {}, {}
    for number, batches in enumerate(zip(*walks, strict=True)):
        starts = {batch["net_input"]["start"] for batch in batches}
        assert starts == {dataset.segment_start(number)}
        assert len({batch["target"].shape for batch in batches}) == 1
        for batch in batches:
            for row, index in enumerate(batch["id"].tolist()):
                scored = batch["target"][row] != PAD
                place = (index % dataset.num_streams, number)
                read[place] = batch["net_input"]["src_tokens"][row][scored].tolist()
                predicted[place] = batch["target"][row][scored].tolist()
    assert [token for place in sorted(predicted) for token in predicted[place]] == tokens.tolist()
    assert [token for place in sorted(read) for token in read[place]] == [EOS, *tokens[:-1]]
    assert len({len(predicted[0, number]) for number in range(dataset.num_segments - 1)}) > 2


@pytest.mark.parametrize(("split", "epoch", "drawn"), [("train", 1, True), ("valid", 1, False)])
def test_only_training_has_segments_of_random_lengths(split, epoch, drawn, monkeypatch):
    cfg = SegmentLanguageModelingConfig(
        data="DATA", tokens_per_sample=9, segment_jitter=4, train_subset="train", dataset_impl=None
    )
    task = SegmentLanguageModelingTask(cfg, dictionary())
    module = "fairseq_plugins.segment_language_model.task"
    monkeypatch.setattr(f"{module}.load_tokens", lambda *_: text(97))
    task.load_dataset(split, epoch)
    walk = task.get_batch_iterator(task.dataset(split), max_sentences=2, seed=3, epoch=epoch)
    assert walk.dataset.jitter == ((4, 3, epoch) if drawn else None)
