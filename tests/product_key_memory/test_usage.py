"""Usage and KL divergence: their formulas, heads, workers, and what validation logs of models."""

import math

import pytest
import torch
from fairseq.logging import metrics

from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from tests import tiny
from tests.product_key_memory.tiny import (
    BUILDERS,
    build,
    memories,
    padded,
    score,
    tiny_language_model,
)
from tests.two_workers import on_two_workers

SLOTS = 8


def reads_of(slots, weights, **options):
    """z' of reads listed by token and head."""
    recorded = MemoryUsage(SLOTS, **options)
    recorded.record(torch.tensor(slots), torch.tensor(weights))
    return recorded.total()


def test_tiny_weights_count_as_reads_but_hardly_lower_the_divergence():
    # section 4.2: perfect usage, very high KL
    weights = [1e-6] * SLOTS
    weights[5] = 1.0
    reads = reads_of([[list(range(SLOTS))]], [[weights]])
    assert usage(reads) == 1
    z = [w / sum(weights) for w in weights]
    expected = math.log(SLOTS) + sum(p * math.log(p) for p in z)
    assert kl_from_uniform(reads) == pytest.approx(expected)
    assert expected > math.log(SLOTS) - 1e-3


def test_weights_of_a_slot_are_summed_over_tokens_heads_and_records():
    recorded = MemoryUsage(SLOTS, heads=2)
    recorded.record(torch.tensor([[[0, 1], [1, 2]]]), torch.tensor([[[0.25, 0.75], [0.5, 0.5]]]))
    recorded.record(
        torch.tensor([[[7, 1], [0, 0]]] * 2), torch.tensor([[[1.0, 0], [0.5, 0.5]]] * 2)
    )
    assert recorded.total().tolist() == [2.25, 1.25, 0.5, 0, 0, 0, 0, 2]
    assert recorded.tokens == 3
    assert usage(recorded.total()) == 4 / SLOTS
    z = [2.25 / 6, 1.25 / 6, 0.5 / 6, 2 / 6]
    expected = math.log(SLOTS) + sum(p * math.log(p) for p in z)
    assert kl_from_uniform(recorded.total()) == pytest.approx(expected)


def test_a_read_of_weight_zero_is_none():
    reads = reads_of([[[0, 1, 2]]], [[[0.0, 0.5, 0.5]]])
    assert usage(reads) == 2 / SLOTS
    assert kl_from_uniform(reads) == pytest.approx(math.log(SLOTS / 2))


def test_heads_are_kept_apart_where_asked_for():
    slots = torch.tensor([[[0, 1], [1, 2]], [[3, 3], [0, 7]]])
    weights = torch.tensor([[[0.25, 0.75], [0.5, 0.5]], [[0.5, 0.5], [0.125, 0.875]]])
    apart, together = MemoryUsage(SLOTS, 2, by_head=True), MemoryUsage(SLOTS, 2)
    for recorded in (apart, together):
        recorded.record(slots, weights)
    assert apart.reads.tolist() == [
        [0.25, 0.75, 0, 1, 0, 0, 0, 0],
        [0.125, 0.5, 0.5, 0, 0, 0, 0, 0.875],
    ]
    assert together.reads.tolist() == [[0.375, 1.25, 0.5, 1, 0, 0, 0, 0.875]]
    assert torch.equal(apart.total(), together.total())
    one_head = MemoryUsage(SLOTS, 1, by_head=True)
    one_head.record(slots[:, :1], weights[:, :1])
    assert torch.equal(one_head.reads, apart.reads[:1])


def test_nothing_read_is_no_usage_and_no_divergence():
    nothing = MemoryUsage(SLOTS).total()
    assert usage(nothing) == 0
    assert math.isnan(kl_from_uniform(nothing))


def record_on(rank):
    """Worker 0 reads slots 0 and 1, worker 1 nothing at first and then slots 1 and 5."""
    recorded = MemoryUsage(SLOTS, 2, by_head=True)
    weights = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    if rank == 0:
        recorded.record(torch.tensor([[[0, 1], [0, 7]]]), weights)
    first = recorded.total()
    if rank == 1:
        recorded.record(torch.tensor([[[5, 1], [5, 1]]]), weights)
    # asking twice adds nothing twice
    return first, recorded.total(), recorded.total(), recorded.reads


def test_reads_of_two_workers_are_summed(tmp_path):
    for rank, (first, second, again, own) in enumerate(on_two_workers(record_on, tmp_path)):
        assert first.tolist() == [1.25, 0.75, 0, 0, 0, 0, 0, 0]
        assert second.tolist() == [1.25, 1.5, 0, 0, 0, 1.25, 0, 0]
        assert torch.equal(again, second)
        assert own.sum().item() == 2
        assert own[:, 5].any().item() == bool(rank)
        assert usage(second) == 3 / SLOTS


# --- what validation logs


def reads_in(model, batches):
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
        usage_by_hand, kl_by_hand = by_hand(reads_in(model, batches))
        found = validate(model, batches)
        assert list(found) == ["memory2_usage", "memory2_kl"]
        assert found["memory2_usage"] == usage_by_hand
        assert found["memory2_kl"] == kl_by_hand


@pytest.mark.parametrize("kind", BUILDERS)
def test_models_name_the_layer_and_the_part(kind):
    model, batch = build(kind).eval(), padded(6, 4)
    names = ["encoder_memory2", "decoder_memory1"] if kind == "translation" else ["memory2"]
    with metrics.aggregate(new_root=True) as found, torch.no_grad():
        score(model, batch)
        # as generation does in validation (--eval-bleu)
        before = dict(found.get_smoothed_values())
        if kind == "translation":
            model.encoder(tiny.tokens(3, 9, 7))
        assert found.get_smoothed_values() == before
    of_memories = [name for name in before if "memory" in name]
    assert of_memories == [f"{name}_{figure}" for name in names for figure in ("usage", "kl")]


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
