"""Streams over a split predict every token once; a pass over them owns their pasts."""

import logging
import re
import tracemalloc

import numpy as np
import pytest
import torch

from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts, StreamPasts
from fairseq_plugins.segment_language_model.streams import StreamIterator, TokenStreams
from tests.tiny import dictionary, text, tiny_model, tokens

PAD, EOS = 1, 2
LAYOUTS = [
    (length, streams, workers)
    for length in (1, 10, 97)
    for streams in (1, 3, 8)
    for workers in (1, 2)
    if streams * workers <= length
]


@pytest.mark.parametrize(("length", "streams", "workers"), LAYOUTS)
@pytest.mark.parametrize("segment", [1, 7, 1000])
@pytest.mark.parametrize("context", [0, 5])
def test_streams_predict_every_token_once(length, streams, workers, segment, context):
    """With extended context, segments also read the tokens before them, without predicting them."""
    whole, total = [EOS, *text(length).tolist()], streams * workers
    dataset = TokenStreams(text(length), dictionary(), total, segment, context)
    passes = [
        StreamIterator(dataset, workers, worker).next_epoch_itr() for worker in range(workers)
    ]
    parts = np.array_split(np.arange(length), total)
    for number, batches in enumerate(zip(*passes, strict=True)):
        segments = [part[number * segment : (number + 1) * segment] for part in parts]
        # on all workers, a segment's batches are as wide as its longest stream
        width = len(segments[0]) + context
        for worker, batch in enumerate(batches):
            own, first = slice(worker * streams, (worker + 1) * streams), number * total
            assert batch["id"].tolist() == [*range(first, first + total)][own]
            assert batch["net_input"]["start"] == number * segment
            assert batch["stream_tokens"] == [*map(len, segments[own])]
            assert batch["ntokens"] == sum(batch["stream_tokens"])
            for row, places in enumerate(segments[own]):
                begin, end = (places[0], places[-1] + 1) if len(places) else (0, 0)
                before = min(begin, context)
                padding = [PAD] * (width - before - len(places))
                source = batch["net_input"]["src_tokens"][row].tolist()
                assert source == whole[begin - before : end] + padding
                target = batch["target"][row].tolist()
                assert target == [PAD] * before + whole[begin + 1 : end + 1] + padding
                assert batch["start_indices"][row] == before
                assert batch["net_input"]["src_lengths"][row] == before + len(places)
    # the last segment of the longest stream has its last token
    assert segments[0][-1] == parts[0][-1]


def read_segment(model, stream, pasts, start, end):
    return model(stream[:, start:end], pasts=pasts, start=start)[0]


def test_pasts_are_changed_by_no_other_pass():
    model, other = (tiny_model(seed).double() for seed in (1, 2))
    stream, pasts = tokens(2, 12), EnsemblePasts()
    read_segment(model, stream, pasts, 0, 6)
    # a batch without a past, a validation, another model of an ensemble
    model(tokens(2, 6, seed=9))
    with torch.no_grad():
        read_segment(model.eval(), tokens(5, 12, seed=9), EnsemblePasts(), 0, 6)
    model.train()
    read_segment(other, stream, pasts, 0, 6)
    for each in (model, other):
        whole = each(stream)[0]
        torch.testing.assert_close(read_segment(each, stream, pasts, 6, 12), whole[:, 6:])


def test_all_segments_of_an_update_that_runs_again_have_the_same_pasts(caplog):
    model, stream, pasts = tiny_model().double(), tokens(2, 24), EnsemblePasts()
    segments = [(start, start + 6) for start in (6, 12)]
    pasts.first.start_update(0)
    # a single segment may run again by itself
    for _ in range(2):
        read_segment(model, stream, pasts, 0, 6)
    pasts.first.start_update(1)
    first = [read_segment(model, stream, pasts, *segment) for segment in segments]
    pasts.first.start_update(1)
    again = [read_segment(model, stream, pasts, *segment) for segment in segments]
    assert all(map(torch.equal, first, again))
    pasts.first.start_update(2)
    whole = model(stream)[0]
    torch.testing.assert_close(read_segment(model, stream, pasts, 18, 24), whole[:, 18:])
    assert not caplog.records
    # what an earlier update has read is not repeated
    read_segment(model, stream, pasts, 6, 12)
    assert "empty recurrence" in caplog.text


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([(0, 6), (12, 18)], "segment at token 12 follows token 6 .*: the recurrence goes on"),
        ([(6, 12)], "segment at token 6 follows token 0 .*: it starts with an empty recurrence"),
        # after a batch that was skipped, the next ones are in order
        ([(0, 6), (12, 18), (12, 18), (18, 24)], "segment at token 12"),
    ],
)
def test_segments_out_of_order_cause_a_warning(caplog, segments, message):
    model, pasts = tiny_model(), EnsemblePasts()
    for start, end in segments:
        read_segment(model, tokens(2, 24), pasts, start, end)
    assert len(caplog.records) == 1
    assert re.search(message, caplog.text)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pasts_survive_a_checkpoint_and_more_workers(tmp_path, dtype):
    model, stream = tiny_model().to(dtype), tokens(4, 12)
    pasts = EnsemblePasts()
    read_segment(model, stream, pasts, 0, 6)
    torch.save(pasts.first.state_dict(), tmp_path / "state.pt")
    expected = read_segment(model, stream, pasts, 6, 12)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for worker in (0, 1):
        restored = EnsemblePasts(StreamPasts.from_state_dict(state, worker, 2))
        rows = slice(2 * worker, 2 * worker + 2)
        # with another number of rows, matrix products may be summed in another order
        actual = read_segment(model, stream[rows], restored, 6, 12)
        torch.testing.assert_close(actual, expected[rows])


def iterator(streams=2, shuffled_with=None, segment=5, **options):
    dataset = TokenStreams(text(43), dictionary(), streams, segment, shuffled_with=shuffled_with)
    return StreamIterator(dataset, num_shards=1, shard_id=0, **options)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("offset", [0, 6000])
def test_the_start_of_a_pass_takes_no_memory_for_the_rest_of_it(workers, offset):
    tokens = np.broadcast_to(np.uint16(EOS), 10_000_000)
    dataset = TokenStreams(tokens, dictionary(), num_streams=100, segment_length=10)
    # what torch imports for the first batch does not count
    next(iterator().next_epoch_itr())
    tracemalloc.start()
    epochs = StreamIterator(dataset, workers, workers - 1)
    place = {"epoch": 1, "iterations_in_epoch": offset, "layout": dataset.describe()}
    epochs.load_state_dict(place)
    batches = epochs.next_epoch_itr()
    batch, ids = next(batches), epochs.first_batch["id"].tolist()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # the batches have a million items
    assert peak < 1_000_000
    assert ids == [*range(100 // workers)]
    assert len(epochs) == len(batches) == 10_000
    first = offset * 100 + (workers - 1) * 50
    assert batch["id"].tolist() == [*range(first, first + 100 // workers)]


@pytest.mark.parametrize("buffer_size", [0, 4])
def test_each_pass_has_new_pasts_and_segments_in_order(buffer_size):
    epochs = iterator(buffer_size=buffer_size)
    inputs = [
        [batch["net_input"] for batch in epochs.next_epoch_itr(shuffle=True)] for _ in range(2)
    ]
    for segments in inputs:
        assert [segment["start"] for segment in segments] == [0, 5, 10, 15, 20]
        assert len({id(segment["pasts"]) for segment in segments}) == 1
    assert inputs[0][0]["pasts"] is not inputs[1][0]["pasts"]
    # the next epoch starts without pasts
    assert "pasts" not in epochs.state_dict()


def test_a_pass_refuses_another_layout():
    epochs = iterator(shuffled_with=1)
    next(epochs.next_epoch_itr())
    for options, layout in [
        ({"streams": 3, "shuffled_with": 1}, "3 streams"),
        ({"shuffled_with": 2}, "shuffled with seed 2"),
        ({}, "2 streams, segments of 5 tokens"),
        ({"shuffled_with": 1, "segment": 4}, "segments of 4 tokens"),
    ]:
        with pytest.raises(ValueError, match=f"shuffled with seed 1.* this run .*{layout}.*--seed"):
            iterator(**options).load_state_dict(epochs.state_dict())
    iterator(shuffled_with=1).load_state_dict(epochs.state_dict())


def test_a_checkpoint_without_pasts_causes_a_warning(caplog):
    model, on_request = tiny_model(), iterator(save_pasts=False)
    model(**next(on_request.next_epoch_itr())["net_input"])
    assert "pasts" not in on_request.state_dict()
    epochs = iterator()
    next(epochs.next_epoch_itr())
    with caplog.at_level(logging.WARNING):
        # no model has run, as on a worker whose states were not gathered
        state = epochs.state_dict()
        assert state["pasts"] is None
        iterator().load_state_dict(state)
    assert "so leave out --disable-validation and --validate-after-updates" in caplog.text
    assert "the checkpoint holds no recurrence of the streams: resuming cold" in caplog.text
