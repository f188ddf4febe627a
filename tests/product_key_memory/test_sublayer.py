"""Memories in the place of a position-wise map: padding, incremental decoding, training."""

import copy

import pytest
import torch
from fairseq.logging import metrics

from fairseq_plugins.product_key_memory.transformer_layers import padding_of_last_tokens
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from tests import tiny
from tests.product_key_memory.tiny import (
    MEMORY,
    memories,
    padded,
    tiny_language_model,
    tiny_transformer,
)

PLACES = pytest.mark.parametrize("interleave", [False, True], ids=["replaced", "interleaved"])
SEGMENT_MODELS = pytest.mark.parametrize(
    "build", [tiny.tiny_transformer_xl, tiny.tiny_model], ids=["transformer_xl", "all_attention"]
)


def inner_loss(model, *inputs):
    """A loss that has a gradient for all of the model's parameters that are used."""
    return model(*inputs)[0].square().sum()


def gradients(model):
    """Gradients by name, of the memories' values also those beside autograd."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: g.to_dense() if g.is_sparse else g for name, g in found.items()}


@PLACES
def test_padding_changes_nothing_in_a_language_model(interleave):
    model = tiny_language_model(
        memory_layers="2", memory_interleave=interleave, memory_query_batch_norm=True
    ).eval()
    batch = padded(7, 4, 5)
    together, _ = model(batch)
    for row, length in enumerate((7, 4, 5)):
        alone, _ = model(batch[row : row + 1, :length])
        torch.testing.assert_close(together[row, :length], alone[0])


@PLACES
def test_padding_changes_nothing_in_translation(interleave):
    model = tiny_transformer(
        encoder_memory_layers="2",
        decoder_memory_layers="1",
        memory_interleave=interleave,
        memory_query_batch_norm=True,
    ).eval()
    source, target = padded(7, 4, left=True), padded(5, 6)
    together, _ = model(source, torch.tensor([7, 4]), target)
    alone, _ = model(source[1:, 3:], torch.tensor([4]), target[1:])
    torch.testing.assert_close(together[1], alone[0])


@SEGMENT_MODELS
@PLACES
def test_padding_changes_nothing_in_a_segment(build, interleave):
    model = build(
        **MEMORY, memory_layers="2", memory_interleave=interleave, memory_query_batch_norm=True
    ).eval()
    batch = padded(8, 3)
    together, _ = model(batch)
    alone, _ = model(batch[1:, :3])
    torch.testing.assert_close(together[1, :3], alone[0])


@pytest.mark.parametrize("kind", ["language model", "encoder", "decoder", "segment"])
def test_padding_takes_no_part_in_batch_norm(kind):
    """More of it leaves the statistics of training as they are."""

    def statistics(extra):
        batch = padded(7, 4, width=7 + extra)
        if kind == "language model":
            model = tiny_language_model(memory_layers="1", memory_query_batch_norm=True)
            model.train()(batch)
        elif kind == "segment":
            model = tiny.tiny_model(**MEMORY, memory_layers="1", memory_query_batch_norm=True)
            model.train()(batch)
        else:
            model = tiny_transformer(
                **{f"{kind}_memory_layers": "1"}, memory_query_batch_norm=True
            ).train()
            model(batch, torch.tensor([7, 4]), batch)
        return memories(model)[0].query_network.batch_norm.running_mean

    torch.testing.assert_close(statistics(3), statistics(0))
    assert statistics(0).any()


def test_the_mask_is_that_of_the_last_tokens():
    """Whatever the width of the mask: a decoder may be given that of all tokens so far."""
    mask = torch.tensor([[True, False, False], [False, False, True]])
    assert padding_of_last_tokens(mask, torch.zeros(1, 2, 16)).tolist() == [[False, True]]
    assert torch.equal(padding_of_last_tokens(mask, torch.zeros(3, 2, 16)), mask.t())
    assert padding_of_last_tokens(None, torch.zeros(3, 2, 16)) is None


@PLACES
def test_incremental_decoding_is_a_full_pass_in_a_language_model(interleave):
    model = tiny_language_model(memory_layers="2,3", memory_interleave=interleave).eval()
    batch = tiny.tokens(3, 9)
    full, _ = model(batch)
    state = {}
    for end in range(1, 10):
        step, _ = model.decoder(batch[:, :end], incremental_state=state)
        torch.testing.assert_close(step[:, -1], full[:, end - 1])


@PLACES
def test_incremental_decoding_is_a_full_pass_in_translation(interleave):
    model = tiny_transformer(
        encoder_memory_layers="1", decoder_memory_layers="1,2", memory_interleave=interleave
    ).eval()
    source, target = padded(6, 4), tiny.tokens(2, 7)
    lengths = torch.tensor([6, 4])
    full, _ = model(source, lengths, target)
    encoded, state = model.encoder(source, src_lengths=lengths), {}
    for end in range(1, 8):
        step, _ = model.decoder(target[:, :end], encoder_out=encoded, incremental_state=state)
        torch.testing.assert_close(step[:, -1], full[:, end - 1])


@SEGMENT_MODELS
@PLACES
def test_incremental_decoding_is_a_full_pass_in_segments(build, interleave):
    model = build(**MEMORY, memory_layers="2", memory_interleave=interleave).eval()
    batch, state = tiny.tokens(2, 6), {}
    full, _ = model(batch)
    for end in range(1, 7):
        step, _ = model.decoder(batch[:, :end], incremental_state=state)
        torch.testing.assert_close(step[:, -1], full[:, end - 1])


@SEGMENT_MODELS
def test_a_walk_in_segments_is_one_long_segment(build):
    model = build(**MEMORY, memory_layers="1,3", memory_query_batch_norm=True).eval()
    batch, memory = tiny.tokens(2, 12), Recurrence()
    whole, _ = model(batch, recurrence=Recurrence().at(0))
    parts = [model(batch[:, at : at + 4], recurrence=memory.at(at))[0] for at in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)


def checkpointed(kind, interleave, checkpoint, optimizer):
    """Loss and gradients of a model, whose activations are computed again or not."""
    options = {
        "memory_interleave": interleave,
        "memory_query_batch_norm": True,
        "checkpoint_activations": checkpoint,
    }
    batch = padded(7, 4)
    if kind == "translation":
        model = tiny_transformer(
            encoder_memory_layers="2", decoder_memory_layers="1", optimizer=optimizer, **options
        )
        inputs = (batch, torch.tensor([7, 4]), batch)
    else:
        builder = {"language model": tiny_language_model, "segment": tiny.tiny_transformer_xl}[kind]
        model = builder(
            **{**MEMORY, "memory_layers": "2", **options, "memory_optimizer": optimizer}
        )
        inputs = (batch,)
    loss = inner_loss(model.train(), *inputs)
    # what comes between the passes leaves the first one's padding as it was
    with torch.no_grad():
        model(*(torch.roll(x, 1, 0) for x in inputs))
    loss.backward()
    return loss, gradients(model)


@pytest.mark.parametrize("kind", ["language model", "translation", "segment"])
@pytest.mark.parametrize("optimizer", ["adam", "adam_with_memory"])
@PLACES
def test_computing_activations_again_changes_no_gradient(kind, interleave, optimizer):
    expected_loss, expected = checkpointed(kind, interleave, False, optimizer)
    loss, actual = checkpointed(kind, interleave, True, optimizer)
    torch.testing.assert_close(loss, expected_loss)
    assert actual.keys() == expected.keys()
    assert sum(name.endswith("memory.values") for name in expected) == 1 + (kind == "translation")
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, msg=name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@PLACES
def test_half_precisions(dtype, interleave):
    options = {"memory_interleave": interleave, "memory_query_batch_norm": True}
    model = tiny_transformer(encoder_memory_layers="1", decoder_memory_layers="1", **options)
    batch = padded(7, 4)
    model.to(dtype)(batch, torch.tensor([7, 4]), batch)[0].float().sum().backward()
    models = [
        build(**{**MEMORY, "memory_layers": "2", **options})
        for build in (tiny_language_model, tiny.tiny_transformer_xl, tiny.tiny_model)
    ]
    for model in models:
        scores, _ = model.to(dtype)(batch)
        assert scores.dtype == dtype
        scores.float().sum().backward()
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())


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


def with_optimizer(kind, optimizer):
    """A model with one memory, and inputs for it."""
    batch = padded(7, 4)
    if kind == "translation":
        model = tiny_transformer(decoder_memory_layers="1", optimizer=optimizer)
        return model, (batch, torch.tensor([7, 4]), batch)
    build = {
        "language model": tiny_language_model,
        "transformer_xl": tiny.tiny_transformer_xl,
        "all_attention": tiny.tiny_model,
    }[kind]
    return build(**MEMORY, memory_layers="2", memory_optimizer=optimizer), (batch,)


KINDS = ["language model", "translation", "transformer_xl", "all_attention"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_without_the_values_is_refused(kind):
    model, inputs = with_optimizer(kind, "adam_with_memory")
    (memory,) = memories(model)
    model.set_num_updates(7)
    inner_loss(model, *inputs).backward()
    # a second batch of the same update
    model.set_num_updates(7)
    inner_loss(model, *inputs).backward()
    assert memory.values.grad is not None
    with pytest.raises(
        ValueError,
        match=r"^an update was made without the values of a product-key memory: --optimizer "
        r"adam_with_memory has to see .*; give --fp16-no-flatten-grads with --fp16, and no",
    ):
        model.set_num_updates(8)
    memory.values.grad = None
    model.set_num_updates(8)


@pytest.mark.parametrize("kind", KINDS)
def test_dense_gradients_are_nobody_elses_business(kind):
    model, inputs = with_optimizer(kind, "adam")
    for update in range(2):
        model.set_num_updates(update)
        inner_loss(model, *inputs).backward()
