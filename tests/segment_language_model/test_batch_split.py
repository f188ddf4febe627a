"""--batch-split: the update of a batch in parts is that of the whole batch, with less held."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY

from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.segment_language_model.recurrence import (
    Recurrence,
    StreamIterator,
    train_in_parts,
)
from fairseq_plugins.segment_language_model.streams import TokenStreams
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests.tiny import (
    ADAPTIVE,
    dictionary,
    segment_loss,
    spread_spans,
    text,
    tiny_model,
    tiny_transformer_xl,
)

# 7 or 8 tokens a stream: the last segment of some streams is empty
TOKENS, STREAMS, SEGMENT = 36, 5, 7
OPTIMIZER = SimpleNamespace(backward=lambda loss: loss.sum().backward())
MEMORY = {"memory_layers": "2", "memory_slots": 49, "memory_knn": 3, "memory_query_dim": 8}


def with_spans():
    model = tiny_model(adaptive_span=True, span_ramp=2, attention_span=16)
    spread_spans(model)
    return model


def with_memory():
    model = tiny_transformer_xl(**MEMORY)
    for module in model.modules():
        if isinstance(module, ProductKeyMemory):
            module.keep_gradient_beside_autograd()
    return model


def penalized(**options):
    return lambda task: segment_loss(task, **options)


def loss(name, sentence_avg=False):
    return lambda task: CRITERION_REGISTRY[name](task, sentence_avg)


CASES = {
    "recurrence": (tiny_transformer_xl, loss("cross_entropy")),
    "streams": (tiny_transformer_xl, loss("cross_entropy", sentence_avg=True)),
    "half": (tiny_transformer_xl, penalized(half_loss=True)),
    "zeros": (lambda: tiny_transformer_xl(zero_memory=True), loss("cross_entropy")),
    "recomputed": (
        lambda: tiny_transformer_xl(checkpoint_activations=True),
        loss("cross_entropy"),
    ),
    "adaptive softmax": (lambda: tiny_model(**ADAPTIVE), penalized()),
    "spans": (with_spans, penalized(span_loss=0.01)),
    "penalties": (
        tiny_transformer_xl,
        penalized(activation_penalty=0.2, temporal_penalty=0.1),
    ),
    "sparse memory": (with_memory, loss("cross_entropy")),
}


class Training:
    """A training over the same text, in double precision and without dropout."""

    def __init__(self, parts, case="recurrence", tokens=TOKENS, streams=STREAMS, segment=SEGMENT):
        build, criterion = CASES[case]
        config = SegmentLanguageModelingConfig(batch_split=parts)
        self.task = SegmentLanguageModelingTask(config, dictionary())
        self.model = build().double()
        self.criterion = criterion(self.task).train()
        layout = TokenStreams(text(tokens), dictionary(), streams, segment)
        self.walk = StreamIterator(layout, num_shards=1, shard_id=0)

    def updates(self, accumulated=1):
        """Yield loss, sample size and log of each batch, and the gradients of each update."""
        epoch = self.walk.next_epoch_itr()
        while epoch.has_next():
            results = [
                self.task.train_step(next(epoch), self.model, self.criterion, OPTIMIZER, 0)
                for _ in range(min(accumulated, epoch.total - epoch.n))
            ]
            yield results, self.learn()

    def learn(self):
        """Take a step, and return the gradients, dense ones of tables too."""
        gradients = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.to_dense()
                parameter.data -= 0.01 * gradients[name]
                parameter.grad = None
        for module in self.model.modules():
            for parameter, project in getattr(module, "constrained", list)():
                project(parameter.data)
        return gradients


def assert_same_updates(one, other, accumulated=1):
    """Both trainings have the same updates; returns their number."""
    count = 0
    for (ones, gradients), (others, other_gradients) in zip(
        one.updates(accumulated), other.updates(accumulated), strict=True
    ):
        count += 1
        for (value, size, log), (other_value, other_size, other_log) in zip(
            ones, others, strict=True
        ):
            assert size == other_size
            torch.testing.assert_close(value.sum(), other_value.sum(), rtol=1e-6, atol=1e-6)
            assert log.keys() == other_log.keys()
            for key in log.keys() - {"span_mean", "span_max", "logs"}:
                assert float(log[key]) == pytest.approx(float(other_log[key]), rel=1e-6), key
            for key in log.keys() & {"span_mean", "span_max"}:
                ratios = [float(each[key]) / each["logs"] for each in (log, other_log)]
                assert ratios[0] == pytest.approx(ratios[1]), key
        torch.testing.assert_close(gradients, other_gradients)
    return count


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parts", [2, 5])
def test_updates_in_parts_are_those_of_whole_batches(case, parts):
    # parts of 3 and 2 streams; the last segment has parts without a token
    assert assert_same_updates(Training(parts, case), Training(1, case)) == 2
    few = {"tokens": 61, "segment": 4}
    assert assert_same_updates(Training(parts, case, **few), Training(1, case, **few), 3) == 2


@pytest.mark.parametrize("parts", [(1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("case", ["recurrence", "spans"])
def test_a_run_is_resumed_with_another_split(case, parts):
    layout = {"tokens": 61, "segment": 4}
    whole, begun, resumed = (Training(n, case, **layout) for n in (1, *parts))
    uninterrupted, first = whole.updates(), begun.updates()
    for _ in range(2):
        next(first)
        next(uninterrupted)
    resumed.walk.load_state_dict(begun.walk.state_dict())
    resumed.model.load_state_dict(begun.model.state_dict())
    rest = [gradients for _, gradients in resumed.updates()]
    assert len(rest) == 2
    torch.testing.assert_close(rest, [gradients for _, gradients in uninterrupted])


def test_a_checkpoint_after_an_update_that_failed_between_two_parts():
    recurrence = Recurrence()
    model = tiny_transformer_xl()
    for start, sizes in ((0, [2, 1]), (4, [2])):
        for part, size in zip(recurrence.split([2, 1]), sizes, strict=False):
            model(torch.full((size, 4), 5), recurrence=part, start=start)
    # a run resumed from it has as many states of all streams
    assert recurrence.state_dict()["layers"][0].shape == (3, 4, 16)


class Held:
    """A tensor that the backward pass needs; counts how many bytes such tensors hold."""

    now = most = 0

    def __init__(self, tensor):
        self.tensor = tensor
        Held.now += tensor.nbytes
        Held.most = max(Held.most, Held.now)
        weakref.finalize(self, Held.released, tensor.nbytes)

    @staticmethod
    def released(size):
        Held.now -= size


def most_held(parts):
    training = Training(parts, tokens=8 * 64, streams=8, segment=32)
    Held.now = Held.most = 0
    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        for _ in training.updates():
            pass
    assert Held.now == 0
    return Held.most


def test_activations_are_held_of_one_part_at_a_time():
    whole = most_held(1)
    assert most_held(2) < 0.6 * whole
    assert most_held(8) < 0.2 * whole


def test_workers_exchange_gradients_once_a_batch():
    # torch's wrapper of several workers exchanges them in each backward pass outside of no_sync()
    passes = []

    class Wrapped:
        outside = True

        @contextmanager
        def no_sync(self):
            self.outside = False
            yield
            self.outside = True

    def step(part):
        passes.append(model.outside)
        return torch.tensor(float(part)), 1, {"loss": part}

    model = Wrapped()
    assert train_in_parts([2, 3, 4], model, step) == (9, 3, {"loss": 9})
    assert passes == [False, False, True]
