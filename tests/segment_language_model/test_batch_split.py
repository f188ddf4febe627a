"""--batch-split: an update with a batch in parts equals the update with the whole batch."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fairseq_plugins.segment_language_model.batch_split import train_in_parts
from fairseq_plugins.segment_language_model.streams import (
    StreamIterator,
    StreamPasts,
    TokenStreams,
)
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests.product_key_memory.tiny import MEMORY, memories
from tests.tiny import (
    ADAPTIVE,
    dictionary,
    segment_loss,
    spread_spans,
    text,
    tiny_model,
    tiny_transformer_xl,
)

STREAMS, FIGURES = 5, ("span_mean", "span_max")
OPTIMIZER = SimpleNamespace(backward=lambda loss: loss.sum().backward())


def with_spans():
    model = tiny_model(adaptive_span=True, span_ramp=2, attention_span=16)
    spread_spans(model)
    return model


def with_memory():
    model = tiny_transformer_xl(memory_layers="2", **MEMORY)
    for memory in memories(model):
        memory.values.keep_gradient_beside_autograd()
    return model


# how a model is built, and options of its loss
CASES = {
    "recurrence": (tiny_transformer_xl, {}),
    "streams": (tiny_transformer_xl, {"sentence_avg": True}),
    "half": (tiny_transformer_xl, {"half_loss": True}),
    "zeros": (lambda: tiny_transformer_xl(zero_memory=True), {}),
    "recomputed": (lambda: tiny_transformer_xl(checkpoint_activations=True), {}),
    "adaptive softmax": (lambda: tiny_model(**ADAPTIVE), {}),
    "spans": (with_spans, {"span_loss": 0.01}),
    "sparse memory": (with_memory, {}),
}


class Training:
    """A training run over the same text, in double precision and without dropout."""

    def __init__(self, parts, case, tokens, segment):
        build, options = CASES[case]
        config = SegmentLanguageModelingConfig(batch_split=parts)
        self.task = SegmentLanguageModelingTask(config, dictionary())
        self.model = build().double()
        self.criterion = segment_loss(self.task, **options).train()
        layout = TokenStreams(text(tokens), dictionary(), STREAMS, segment)
        self.batches = StreamIterator(layout, num_shards=1, shard_id=0)

    def updates(self, accumulated=1):
        """Yield loss, sample size and log of each batch, and the gradients of each update."""
        epoch = self.batches.next_epoch_itr()
        while epoch.has_next():
            results = []
            for _ in range(min(accumulated, epoch.total - epoch.n)):
                loss, size, log = self.task.train_step(
                    next(epoch), self.model, self.criterion, OPTIMIZER, 0
                )
                # each part logs these statistics of the model, and the logs are summed
                times = log.pop("logs", 1)
                numbers = {k: float(v) / (times if k in FIGURES else 1) for k, v in log.items()}
                results.append((float(loss), size, numbers))
            yield results, self.learn()

    def learn(self):
        """Take a step, and return all gradients as dense tensors."""
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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tokens", "segment", "accumulated"), [(36, 7, 1), (61, 4, 3)])
def test_updates_in_parts_equal_those_of_whole_batches(case, tokens, segment, accumulated):
    # the last segment has a single token, so some parts have none
    whole, in_two, in_five = (
        list(Training(parts, case, tokens, segment).updates(accumulated)) for parts in (1, 2, 5)
    )
    assert len(whole) == 2
    torch.testing.assert_close(in_two, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(in_five, whole, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_after_a_failed_part_has_equally_long_pasts():
    pasts = StreamPasts()
    model = tiny_transformer_xl()
    for start, sizes in ((0, [2, 1]), (4, [2])):
        for part, size in zip(pasts.split([2, 1]), sizes, strict=False):
            model(torch.full((size, 4), 5), pasts=part, start=start)
    # a run resumed from it needs equally long pasts of all streams
    assert pasts.state_dict()["layers"][0].shape == (3, 4, 16)


def test_workers_exchange_gradients_once_a_batch():
    # DistributedDataParallel exchanges gradients in each backward pass outside of no_sync()
    events = []

    @contextmanager
    def no_sync():
        events.append("silence")
        yield
        events.append("end")

    def step(part):
        events.append(part)
        return torch.tensor(float(part), requires_grad=True), 1, {"loss": part}

    loss, *rest = train_in_parts([2, 3, 4], SimpleNamespace(no_sync=no_sync), step)
    assert (loss, *rest) == (9, 3, {"loss": 9})
    # the loss does not keep the activations of a part alive
    assert not loss.requires_grad
    assert events == ["silence", 2, "end", "silence", 3, "end", 4]
