"""Streams over a split: every token once, in order, with its true predecessor."""

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder, make_builder

from fairseq_plugins.segment_language_model.streams import TokenStreams, load_tokens
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
        assert collated["ntokens"] == int((collated["target"] != PAD).sum())
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
