"""Segments of random lengths: as drawn by the published code, alike for all workers and resumes."""

from types import SimpleNamespace

import numpy as np
import pytest

from fairseq_plugins.segment_language_model.stream_iterator import StreamIterator
from fairseq_plugins.segment_language_model.streams import Jitter, TokenStreams, longest_segment
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests.tiny import dictionary, text

PAD, EOS = 1, 2


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
def test_every_token_is_predicted_once_from_the_one_before(streams, workers, context):
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


def test_learned_places_are_refused(monkeypatch):
    cfg = SegmentLanguageModelingConfig(tokens_per_sample=9, segment_jitter=4)
    task = SegmentLanguageModelingTask(cfg, dictionary())
    decoder = SimpleNamespace(absolute_positions=SimpleNamespace(max_positions=9))
    with pytest.raises(ValueError, match="--segment-jitter is 4 with --positions learned-absolute"):
        task._train_on_longer_segments(decoder)
