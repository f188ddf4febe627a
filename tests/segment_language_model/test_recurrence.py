"""The recurrence belongs to a walk over the data: what moves it and what does not."""

import logging

import pytest
import torch

from fairseq_plugins.segment_language_model.recurrence import Recurrence, StreamIterator
from fairseq_plugins.segment_language_model.streams import Jitter, TokenStreams
from tests.tiny import dictionary, text, tiny_model, tokens


def run(model, stream, recurrence, start, end):
    return model(stream[:, start:end], recurrence=recurrence, start=start)[0]


def test_a_batch_without_a_recurrence_moves_nothing():
    model, stream = tiny_model().double(), tokens(2, 12)
    recurrence, other = Recurrence(), Recurrence()
    for m in (recurrence, other):
        run(model, stream, m, 0, 6)
    model(tokens(2, 6, seed=9))
    assert torch.equal(run(model, stream, recurrence, 6, 12), run(model, stream, other, 6, 12))


def test_two_walks_do_not_disturb_each_other():
    model, stream = tiny_model().double(), tokens(2, 12)
    alone = Recurrence()
    run(model, stream, alone, 0, 6)
    expected = run(model, stream, alone, 6, 12)
    training, validation = Recurrence(), Recurrence()
    run(model, stream, training, 0, 6)
    with torch.no_grad():
        run(model, tokens(5, 12, seed=9), validation, 0, 6)
    assert torch.equal(run(model, stream, training, 6, 12), expected)


def test_models_of_an_ensemble_remember_for_themselves():
    one, two, stream = tiny_model(1).double(), tiny_model(2).double(), tokens(2, 12)
    shared, own = Recurrence(), Recurrence()
    for model in (one, two):
        run(model, stream, shared, 0, 6)
    run(two, stream, own, 0, 6)
    assert torch.equal(run(two, stream, shared, 6, 12), run(two, stream, own, 6, 12))


def test_a_segment_that_is_run_again_reads_what_it_read_before():
    model, stream = tiny_model().double(), tokens(2, 18)
    recurrence = Recurrence()
    run(model, stream, recurrence, 0, 6)
    first = run(model, stream, recurrence, 6, 12)
    again = run(model, stream, recurrence, 6, 12)
    assert torch.equal(first, again)
    whole = model(stream)[0]
    torch.testing.assert_close(run(model, stream, recurrence, 12, 18), whole[:, 12:])


def test_a_skipped_segment_is_said(caplog):
    model, stream = tiny_model().double(), tokens(2, 18)
    recurrence = Recurrence()
    run(model, stream, recurrence, 0, 6)
    with caplog.at_level(logging.WARNING):
        run(model, stream, recurrence, 12, 18)
    assert "segment at token 12 follows one that ended at token 6" in caplog.text


def test_a_cold_start_in_the_middle_is_said(caplog):
    with caplog.at_level(logging.WARNING):
        run(tiny_model(), tokens(2, 18), Recurrence(), 6, 12)
    assert "segment at token 6 starts with an empty recurrence" in caplog.text


def test_states_have_no_gradient():
    model, stream = tiny_model().double(), tokens(2, 12)
    recurrence = Recurrence()
    run(model, stream, recurrence, 0, 6)
    embedding = model.decoder.embed_tokens.weight
    for parameter in model.parameters():
        parameter.grad = None
    run(model, stream, recurrence, 6, 12).sum().backward()
    only_before = set(stream[:, :6].flatten().tolist()) - set(stream[:, 6:].flatten().tolist())
    assert only_before
    assert embedding.grad[sorted(only_before)].abs().max() == 0


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
        # products of more rows may be summed in another order
        torch.testing.assert_close(run(model, stream[rows], restored, 6, 12), expected[rows])


def iterator(streams=2, segment=5, shuffled_with=None, jitter=None, **options):
    drawn = {"shuffled_with": shuffled_with, "jitter": jitter}
    dataset = TokenStreams(text(43), dictionary(), streams, segment, **drawn)
    return StreamIterator(dataset, num_shards=1, shard_id=0, **options)


@pytest.mark.parametrize("buffer_size", [0, 4])
def test_each_walk_has_a_recurrence_of_its_own_and_places_in_order(buffer_size):
    walks = iterator(buffer_size=buffer_size)
    inputs = [
        [batch["net_input"] for batch in walks.next_epoch_itr(shuffle=True)] for _ in range(2)
    ]
    for walk in inputs:
        assert [one["start"] for one in walk] == [0, 5, 10, 15, 20]
        assert len({id(one["recurrence"]) for one in walk}) == 1
    assert inputs[0][0]["recurrence"] is not inputs[1][0]["recurrence"]


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
    assert len(again) == len(rest) == 3
    for one, other in zip(rest, again, strict=True):
        assert torch.equal(one, other)


def test_the_recurrence_is_left_out_of_a_checkpoint_on_request():
    model, walks = tiny_model(), iterator(save_recurrence=False)
    model(**next(walks.next_epoch_itr())["net_input"])
    assert walks.state_dict()["recurrence"] is None


def test_a_walk_over_other_streams_is_refused():
    walks = iterator()
    next(walks.next_epoch_itr())
    with pytest.raises(
        ValueError,
        match="over 43 tokens in 2 streams, segments of 5 tokens, and this run has 43 tokens in 3 "
        "streams, segments of 5 tokens: resume with the same data, --tokens-per-sample",
    ):
        iterator(streams=3).load_state_dict(walks.state_dict())


def test_a_walk_over_sentences_in_another_order_is_refused():
    walks = iterator(shuffled_with=1)
    next(walks.next_epoch_itr())
    for other, said in ((2, ", sentences shuffled with seed 2"), (None, "")):
        with pytest.raises(
            ValueError,
            match=f"shuffled with seed 1, .* in 2 streams{said}, segments of 5 tokens: resume",
        ):
            iterator(shuffled_with=other).load_state_dict(walks.state_dict())
    iterator(shuffled_with=1).load_state_dict(walks.state_dict())


def test_a_checkpoint_without_recurrence_is_said(caplog):
    walks = iterator()
    next(walks.next_epoch_itr())
    with caplog.at_level(logging.WARNING):
        # no model has run, as on a worker whose states were not gathered
        state = walks.state_dict()
        assert state["recurrence"] is None
        iterator().load_state_dict(state)
    assert "so leave out --disable-validation and --validate-after-updates" in caplog.text
    assert "the checkpoint holds no recurrence of the streams: resuming cold" in caplog.text


def test_the_end_of_an_epoch_is_saved_without_recurrence():
    walks = iterator()
    for _ in walks.next_epoch_itr():
        pass
    state = walks.state_dict()
    assert (state["epoch"], state["iterations_in_epoch"]) == (2, 0)
    assert "memory" not in state
