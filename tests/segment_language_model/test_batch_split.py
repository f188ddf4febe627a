"""--batch-split: an update with a batch in parts equals the update with the whole batch."""

from types import SimpleNamespace

import pytest
import torch

from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts, StreamPasts
from fairseq_plugins.segment_language_model.streams import StreamIterator, TokenStreams
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests.product_key_memory.tiny import MEMORY
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
    return tiny_transformer_xl(memory_layers="2", memory_optimizer="adam_with_memory", **MEMORY)


# how a model is built, and options of its loss
CASES = {
    "recurrence": (tiny_transformer_xl, {}),
    "streams": (tiny_transformer_xl, {"sentence_avg": True}),
    "half": (tiny_transformer_xl, {"half_loss": True}),
    "zeros": (lambda: tiny_transformer_xl(zero_past=True), {}),
    "recomputed": (lambda: tiny_transformer_xl(checkpoint_activations=True), {}),
    "adaptive softmax": (lambda: tiny_model(**ADAPTIVE), {}),
    "spans": (with_spans, {"span_loss": 0.01}),
    "sparse memory": (with_memory, {}),
}


def train(parts, case, tokens, segment, accumulated):
    """Train in double precision and without dropout.

    Return loss, sample size and log of each batch, and the gradients of each update.
    """
    build, options = CASES[case]
    config = SegmentLanguageModelingConfig(batch_split=parts)
    task, model = SegmentLanguageModelingTask(config, dictionary()), build().double()
    criterion = segment_loss(task, **options).train()
    streams = TokenStreams(text(tokens), dictionary(), STREAMS, segment)
    batches, results = StreamIterator(streams, num_shards=1, shard_id=0).next_epoch_itr(), []
    for number, batch in enumerate(batches, start=1):
        loss, size, log = task.train_step(batch, model, criterion, OPTIMIZER, 0)
        # each part logs these statistics of the model, and the logs are summed
        times = log.pop("logs", 1)
        log = {k: float(v) / (times if k in FIGURES else 1) for k, v in log.items()}
        results.append((float(loss), size, log))
        if number % accumulated == 0 or number == len(batches):
            results.append(learn(model))
    return results


def learn(model):
    """Take a step, and return all gradients as dense tensors."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad.to_dense()
            parameter.data -= 0.01 * gradients[name]
            parameter.grad = None
    return gradients


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("tokens", "segment", "accumulated"), [(36, 7, 1), (61, 4, 3)])
def test_updates_in_parts_equal_those_of_whole_batches(case, tokens, segment, accumulated):
    # the last segment has a single token, so some parts have none
    whole, *split = (train(parts, case, tokens, segment, accumulated) for parts in (1, 2, 5))
    for each in split:
        torch.testing.assert_close(each, whole, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_after_a_failed_part_has_equally_long_pasts():
    pasts = StreamPasts()
    model = tiny_transformer_xl()
    for start, sizes in ((0, [2, 1]), (4, [2])):
        for part, size in zip(pasts.split([2, 1]), sizes, strict=False):
            model(torch.full((size, 4), 5), pasts=EnsemblePasts(part), start=start)
    # a run resumed from it needs equally long pasts of all streams
    assert pasts.state_dict()["layers"][0].shape == (3, 4, 16)
