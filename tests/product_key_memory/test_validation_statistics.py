"""How much of their memories models read in validation, as fairseq logs it."""

import pytest
import torch
from fairseq.logging import metrics

from fairseq_plugins.product_key_memory.options import watch_memories
from fairseq_plugins.product_key_memory.usage import MemoryUsage
from tests import tiny
from tests.product_key_memory.tiny import (
    MEMORY,
    memories,
    padded,
    tiny_language_model,
    tiny_transformer,
)


def reads_of(model, batches):
    """z' of a model's only memory over batches, from the slots and weights that it selects."""
    (memory,) = memories(model)
    z = torch.zeros(len(memory.values), dtype=torch.float64)

    def add(_, inputs, output):
        scores, slots = output
        weights = scores.detach().double().softmax(-1)
        for slot, weight in zip(slots.flatten().tolist(), weights.flatten().tolist(), strict=True):
            z[slot] += weight

    handle = memory.keys.register_forward_hook(add)
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    return z


def by_hand(z):
    """Usage in per cent and KL divergence in nats, rounded as they are logged."""
    z = z / z.sum()
    kl = torch.log(torch.tensor(float(len(z)))) + sum(p * p.log() for p in z[z > 0])
    return round(100 * (z > 0).sum().item() / len(z), 2), pytest.approx(kl.item(), abs=1e-4)


def validate(model, batches):
    """What fairseq's validate() does."""
    with metrics.aggregate(new_root=True) as found:
        for batch in batches:
            with metrics.aggregate("valid"), torch.no_grad():
                model.eval()
                model(batch)
    return found.get_smoothed_values()


def test_each_pass_of_validation_has_figures_of_its_own():
    model = tiny_language_model(memory_layers="2", memory_query_batch_norm=True)
    one, other = [tiny.tokens(2, 4, 1), padded(5, 3)], [tiny.tokens(1, 3, 3)]
    model.train()(tiny.tokens(3, 6, 4))
    model.eval()
    for batches in (one, other, one):
        usage_by_hand, kl_by_hand = by_hand(reads_of(model, batches))
        found = validate(model, batches)
        assert list(found) == ["memory2_usage", "memory2_kl"]
        assert found["memory2_usage"] == usage_by_hand
        assert found["memory2_kl"] == kl_by_hand


@pytest.mark.parametrize("build", [tiny.tiny_transformer_xl, tiny.tiny_model])
def test_segment_models_name_the_layer(build):
    model = build(**MEMORY, memory_layers="1,3")
    found = validate(model, [tiny.tokens(2, 8)])
    assert list(found) == ["memory1_usage", "memory1_kl", "memory3_usage", "memory3_kl"]


def test_translation_names_the_part_too():
    model = tiny_transformer(encoder_memory_layers="2", decoder_memory_layers="1").eval()
    batch = padded(6, 4)
    with metrics.aggregate(new_root=True) as found, torch.no_grad():
        model(batch, torch.tensor([6, 4]), batch)
        # as generation does in validation (--eval-bleu)
        before = found.get_smoothed_values()
        model.encoder(tiny.tokens(3, 9, 7))
        assert found.get_smoothed_values() == before
    assert list(before) == [
        *("encoder_memory2_usage", "encoder_memory2_kl"),
        *("decoder_memory1_usage", "decoder_memory1_kl"),
    ]


def test_nothing_is_recorded_outside_validation():
    model = tiny_language_model(memory_layers="2")
    (memory,) = memories(model)
    seen = []
    memory.register_forward_hook(lambda *_: seen.append(memory.usage))
    with metrics.aggregate("train"):
        model.train()(tiny.tokens(1, 3))
    with torch.no_grad():
        model.eval()(tiny.tokens(1, 3))
    with metrics.aggregate(new_root=True):
        model.train()(tiny.tokens(1, 3))
    assert seen == [None, None, None]
    assert not any("memory" in key for key in metrics.get_smoothed_values("default"))
    with metrics.aggregate(new_root=True), torch.no_grad():
        model.eval()(tiny.tokens(1, 3))
    assert isinstance(seen[-1], MemoryUsage)
    assert memory.usage is None


def test_a_failed_pass_leaves_nothing_behind():
    model = tiny_language_model(memory_layers="2").eval()
    with metrics.aggregate(new_root=True), pytest.raises(IndexError):
        model(torch.full((1, 3), 10_000))
    assert memories(model)[0].usage is None


def test_models_without_memories_are_not_watched():
    model = tiny_language_model()
    watch_memories(model, {})
    assert not model._forward_pre_hooks
    assert validate(model, [tiny.tokens(1, 3)]) == {}
