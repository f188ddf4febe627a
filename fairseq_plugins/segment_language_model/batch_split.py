"""Training on a batch in parts of its streams, so that activations are held of one part at a time.

Each part has its own part of the recurrence. Its gradients are added to those of the parts before
it, so the update is that of the whole batch. The published codes call it ``--batch_chunk``
(Transformer-XL) and ``--batch-split`` (adaptive span).

Shapes: B streams, T tokens of a segment.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor


def check_parts(parts: int, streams: int | None) -> None:
    """Raise ``ValueError`` for no ``parts``, or more than a worker's ``streams``; None is one."""
    if parts < 1:
        raise ValueError(f"--batch-split is {parts}: it must be at least 1")
    if parts == 1:
        return
    streams = 1 if streams is None else streams
    if parts > streams:
        raise ValueError(
            f"--batch-split is {parts} and --batch-size {streams}: a part has at least one stream, "
            f"so give --batch-split {streams} or less, or a larger --batch-size"
        )


def part_sizes(streams: int, parts: int) -> list[int]:
    """Return how many of the streams each part has; they differ by one at most."""
    size, larger = divmod(streams, parts)
    return [size + (part < larger) for part in range(parts)]


def split_batch(sample: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Return the parts of a batch, each as wide as the batch and with its part of the recurrence.

    Args:
        sample: a batch of :class:`TokenStreams`, of B streams.
        parts: how many, at most B.
    """
    net_input = dict(sample["net_input"])
    recurrence, start = net_input.pop("recurrence", None), net_input.pop("start", None)
    sizes = part_sizes(len(sample["target"]), parts)
    recurrences = [None] * parts if recurrence is None else recurrence.split(sizes)
    made, end = [], 0
    for size, own_recurrence in zip(sizes, recurrences, strict=True):
        streams = slice(end, end + size)
        end += size
        counts = sample["stream_tokens"][streams]
        own_input: dict[str, Any] = {key: value[streams] for key, value in net_input.items()}
        if own_recurrence is not None:
            own_input |= {"recurrence": own_recurrence, "start": start}
        made.append(
            {
                "id": sample["id"][streams],
                "nsentences": size,
                "ntokens": sum(counts),
                "stream_tokens": counts,
                "start_indices": sample["start_indices"][streams],
                "net_input": own_input,
                "target": sample["target"][streams],
            }
        )
    return made


def train_in_parts(
    parts: list[dict[str, Any]],
    model: Any,
    train_step: Callable[[dict[str, Any]], tuple[Tensor, int, dict[str, Any]]],
) -> tuple[Tensor, int, dict[str, Any]]:
    """Train on one part after another, and return the loss, sample size and log of the batch.

    Args:
        parts: what :func:`split_batch` returned.
        model: the model, which may be wrapped for several workers.
        train_step: computes the loss of a part, in a sum over its tokens, and adds its gradients.
    """
    losses, sizes, logs = [], [], []
    for part in parts:
        # workers exchange gradients in the backward pass of the last part, if in one at all
        last = part is parts[-1]
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            loss, size, log = train_step(part)
        losses.append(loss.detach())  # it holds on to the part's graph
        sizes.append(size)
        logs.append(log)
    # criteria log sums over the tokens, which fairseq adds up over workers and --update-freq, too
    return sum(losses), sum(sizes), {key: sum(log[key] for log in logs) for key in logs[0]}
