"""Memories as sublayers of all models that have them: padding, incremental decoding, training."""

import copy

import pytest
import torch
from fairseq.logging import metrics

from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests import tiny
from tests.product_key_memory.tiny import (
    BUILDERS,
    build,
    inputs_of,
    memories,
    padded,
    score,
    tiny_language_model,
)

PLACES = pytest.mark.parametrize(
    "place",
    [{}, {"memory_interleave": True}, {"memory_parallel": True}],
    ids=["replaced", "interleaved", "parallel"],
)
MODELS = pytest.mark.parametrize("kind", BUILDERS)


def gradients(model):
    """Gradients by name, of the memories' values also those beside autograd."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}


@MODELS
@PLACES
def test_padding_changes_nothing(kind, place):
    model = build(kind, **place, memory_query_batch_norm=True).eval()
    batch = padded(7, 4, 5)
    together = score(model, batch)
    for row, length in enumerate((7, 4, 5)):
        alone = score(model, batch[row : row + 1, :length])
        torch.testing.assert_close(together[row, :length], alone[0])


@MODELS
def test_padding_takes_no_part_in_batch_norm(kind):
    """More of it leaves the statistics of training as they are."""

    def statistics(extra):
        model = build(kind, memory_query_batch_norm=True).train()
        score(model, padded(7, 4, width=7 + extra))
        return [memory.query_network.batch_norm.running_mean for memory in memories(model)]

    torch.testing.assert_close(statistics(3), statistics(0))
    assert all(mean.any() for mean in statistics(0))


@MODELS
@PLACES
def test_incremental_decoding_is_a_full_pass(kind, place):
    model = build(kind, **place).eval()
    batch, state, options = tiny.tokens(3, 9), {}, {}
    full = score(model, batch)
    if kind == "translation":
        source, lengths, _ = inputs_of(model, batch)
        options["encoder_out"] = model.encoder(source, src_lengths=lengths)
    for end in range(1, 10):
        step, _ = model.decoder(batch[:, :end], incremental_state=state, **options)
        torch.testing.assert_close(step[:, -1], full[:, end - 1])


@pytest.mark.parametrize("kind", ["transformer_xl", "all_attention"])
def test_a_walk_in_segments_is_one_long_segment(kind):
    model = build(kind, memory_layers="1,3", memory_query_batch_norm=True).eval()
    batch, memory = tiny.tokens(2, 12), Recurrence()
    whole, _ = model(batch, recurrence=Recurrence(), start=0)
    parts = [model(batch[:, at : at + 4], recurrence=memory, start=at)[0] for at in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def checkpointed(kind, checkpoint, **options):
    """Loss and gradients of a model, whose activations are recomputed or not."""
    model = build(kind, checkpoint_activations=checkpoint, memory_query_batch_norm=True, **options)
    batch = padded(7, 4)
    loss = score(model.train(), batch).square().sum()
    # what comes between the passes leaves the first one's padding as it was
    with torch.no_grad():
        score(model, padded(4, 7))
    loss.backward()
    return loss, gradients(model)


@MODELS
@pytest.mark.parametrize("optimizer", ["adam", "adam_with_memory"])
@PLACES
def test_recomputing_activations_changes_no_gradient(kind, place, optimizer):
    options = {**place, "memory_optimizer": optimizer}
    (expected_loss, expected), (loss, actual) = (
        checkpointed(kind, checkpoint, **options) for checkpoint in (False, True)
    )
    torch.testing.assert_close(loss, expected_loss)
    assert actual.keys() == expected.keys()
    assert sum(name.endswith("memory.values") for name in expected) == 1 + (kind == "translation")
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=name)


def test_a_copy_of_a_model_is_independent():
    """fairseq copies models for --store-ema."""
    model = tiny_language_model(memory_layers="2", memory_interleave=True).eval()
    batch = padded(6, 4)
    expected, _ = model(batch)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(copied(batch)[0], expected)
    with metrics.aggregate(new_root=True) as found:
        copied(batch)
    assert found.get_smoothed_value("memory2_usage") > 0


@MODELS
def test_an_update_without_the_values_is_refused(kind):
    model = build(kind, memory_optimizer="adam_with_memory")
    batch = tiny.tokens(2, 4)
    model.set_num_updates(7)
    score(model, batch).square().sum().backward()
    # a second batch of the same update
    model.set_num_updates(7)
    score(model, batch).square().sum().backward()
    assert all(memory.values.grad is not None for memory in memories(model))
    with pytest.raises(
        ValueError,
        match=r"^an update was made without the values of a product-key memory: --optimizer "
        r"adam_with_memory has to see .*; give --fp16-no-flatten-grads with --fp16, and no",
    ):
        model.set_num_updates(8)
    for memory in memories(model):
        memory.values.grad = None
    model.set_num_updates(8)
