"""The recurrence belongs to a walk over the data: what advances it and what does not."""

import logging

import pytest
import torch

from fairseq_plugins.segment_language_model.recurrence import Recurrence, StreamIterator
from fairseq_plugins.segment_language_model.streams import Jitter, TokenStreams
from tests.tiny import dictionary, text, tiny_model, tokens


def run(model, stream, recurrence, start, end):
    return model(stream[:, start:end], recurrence=recurrence, start=start)[0]


def test_other_batches_walks_and_models_move_nothing():
    model, other = (tiny_model(seed).double() for seed in (1, 2))
    stream, recurrence = tokens(2, 12), Recurrence()
    run(model, stream, recurrence, 0, 6)
    # a batch without a recurrence, a validation, another model of an ensemble
    model(tokens(2, 6, seed=9))
    with torch.no_grad():
        run(model, tokens(5, 12, seed=9), Recurrence(), 0, 6)
    run(other, stream, recurrence, 0, 6)
    for each in (model, other):
        whole = each(stream)[0]
        torch.testing.assert_close(run(each, stream, recurrence, 6, 12), whole[:, 6:])


def test_a_segment_that_is_run_again_reads_what_it_read_before():
    model, stream = tiny_model().double(), tokens(2, 18)
    recurrence = Recurrence()
    run(model, stream, recurrence, 0, 6)
    first = run(model, stream, recurrence, 6, 12)
    assert torch.equal(first, run(model, stream, recurrence, 6, 12))
    whole = model(stream)[0]
    torch.testing.assert_close(run(model, stream, recurrence, 12, 18), whole[:, 12:])


@pytest.mark.parametrize(
    ("walk", "message"),
    [
        ([(0, 6), (12, 18)], "segment at token 12 follows one that ended at token 6"),
        ([(6, 12)], "segment at token 6 starts with an empty recurrence"),
        ([(0, 6), (6, 12), (0, 6)], "segment at token 0 is run again after later ones"),
        ([(0, 6), (6, 12), (6, 12), (12, 18)], ""),
    ],
)
def test_a_walk_that_is_not_in_order_is_warned_about(caplog, walk, message):
    model, recurrence = tiny_model(), Recurrence()
    for start, end in walk:
        run(model, tokens(2, 18), recurrence, start, end)
    assert message in caplog.text
    assert len(caplog.records) == bool(message)


def test_states_have_no_gradient():
    model, stream = tiny_model().double(), tokens(2, 12)
    recurrence = Recurrence()
    run(model, stream, recurrence, 0, 6)
    run(model, stream, recurrence, 6, 12).sum().backward()
    only_before = set(stream[:, :6].flatten().tolist()) - set(stream[:, 6:].flatten().tolist())
    assert only_before
    assert model.decoder.embed_tokens.weight.grad[sorted(only_before)].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_state_survives_a_checkpoint_and_another_number_of_workers(tmp_path, dtype):
    model, stream = tiny_model().to(dtype), tokens(4, 12)
    recurrence = Recurrence()
    run(model, stream, recurrence, 0, 6)
    torch.save(recurrence.state_dict(), tmp_path / "state.pt")
    expected = run(model, stream, recurrence, 6, 12)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for worker in (0, 1):
        restored = Recurrence()
        restored.load_state_dict(state, worker, 2)
        rows = slice(2 * worker, 2 * worker + 2)
        # with another number of rows, matrix products may be summed in another order
        torch.testing.assert_close(run(model, stream[rows], restored, 6, 12), expected[rows])


def iterator(streams=2, shuffled_with=None, jitter=None, **options):
    drawn = {"shuffled_with": shuffled_with, "jitter": jitter}
    dataset = TokenStreams(text(43), dictionary(), streams, 5, **drawn)
    return StreamIterator(dataset, num_shards=1, shard_id=0, **options)


@pytest.mark.parametrize("buffer_size", [0, 4])
def test_each_walk_has_a_recurrence_of_its_own_and_places_in_order(buffer_size):
    walks = iterator(buffer_size=buffer_size)
    inputs = [
        [batch["net_input"] for batch in walks.next_epoch_itr(shuffle=True)] for _ in range(2)
    ]
    for walk in inputs:
        assert [segment["start"] for segment in walk] == [0, 5, 10, 15, 20]
        assert len({id(segment["recurrence"]) for segment in walk}) == 1
    assert inputs[0][0]["recurrence"] is not inputs[1][0]["recurrence"]
    # at the end of an epoch, the state has no recurrence
    state = walks.state_dict()
    assert (state["epoch"], state["iterations_in_epoch"]) == (3, 0)
    assert "recurrence" not in state


@pytest.mark.parametrize("jitter", [None, Jitter(2, seed=1, epoch=1)])
def test_a_walk_resumes_where_it_stopped_with_its_recurrence(jitter):
    model = tiny_model().double()
    walks = iterator(jitter=jitter)
    epoch = walks.next_epoch_itr()
    for _ in range(2):
        model(**next(epoch)["net_input"])
    state = walks.state_dict()
    rest = [model(**batch["net_input"])[0] for batch in epoch]
    resumed = iterator(jitter=jitter)
    resumed.load_state_dict(state)
    again = [model(**batch["net_input"])[0] for batch in resumed.next_epoch_itr()]
    assert len(rest) == 3
    torch.testing.assert_close(again, rest, rtol=0, atol=0)


def test_a_walk_over_another_layout_is_refused():
    walks = iterator(shuffled_with=1)
    next(walks.next_epoch_itr())
    for options, layout in [
        ({"streams": 3, "shuffled_with": 1}, "3 streams"),
        ({"shuffled_with": 2}, "shuffled with seed 2"),
        ({}, "2 streams, segments of 5 tokens"),
        ({"shuffled_with": 1, "jitter": Jitter(2, seed=4, epoch=1)}, "drawn with seed 4"),
    ]:
        with pytest.raises(ValueError, match=f"shuffled with seed 1.* this run .*{layout}.*--seed"):
            iterator(**options).load_state_dict(walks.state_dict())
    iterator(shuffled_with=1).load_state_dict(walks.state_dict())


def test_a_checkpoint_without_recurrence_is_warned_about(caplog):
    model, on_request = tiny_model(), iterator(save_recurrence=False)
    model(**next(on_request.next_epoch_itr())["net_input"])
    assert on_request.state_dict()["recurrence"] is None
    walks = iterator()
    next(walks.next_epoch_itr())
    with caplog.at_level(logging.WARNING):
        # no model has run, as on a worker whose states were not gathered
        state = walks.state_dict()
        assert state["recurrence"] is None
        iterator().load_state_dict(state)
    assert "so leave out --disable-validation and --validate-after-updates" in caplog.text
    assert "the checkpoint holds no recurrence of the streams: resuming cold" in caplog.text
