"""Training on the streams of a batch in several parts, for the same update with less memory.

Shapes: B streams of a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts


def split_batch(sample: dict[str, Any], parts: int) -> list[dict[str, Any]]:
    """Split a batch of B streams, and their pasts, into ``parts``.

    The published codes do the same (Transformer-XL's ``--batch_chunk``).
    """
    net_input = dict(sample["net_input"])
    pasts, start = net_input.pop("pasts", None), net_input.pop("start", None)
    size, larger = divmod(len(sample["target"]), parts)
    sizes = [size + (part < larger) for part in range(parts)]
    all_pasts = [None] * parts if pasts is None else pasts.first.split(sizes)
    batches, end = [], 0
    for size, part_pasts in zip(sizes, all_pasts, strict=True):
        streams = slice(end, end + size)
        end += size
        counts = sample["stream_tokens"][streams]
        part_input: dict[str, Any] = {key: value[streams] for key, value in net_input.items()}
        if part_pasts is not None:
            part_input |= {"pasts": EnsemblePasts(part_pasts), "start": start}
        batches.append(
            {
                "id": sample["id"][streams],
                "nsentences": size,
                "ntokens": sum(counts),
                "stream_tokens": counts,
                "start_indices": sample["start_indices"][streams],
                "net_input": part_input,
                "target": sample["target"][streams],
            }
        )
    return batches


def train_in_parts(
    parts: list[dict[str, Any]],
    model: nn.Module,
    train_step: Callable[[dict[str, Any]], tuple[Tensor, int, dict[str, Any]]],
) -> tuple[Tensor, int, dict[str, Any]]:
    """Train on one part after another, so that only one part's activations are in memory.

    Returns loss, sample size and statistics of the batch; the parts' gradients add up.
    """
    losses, sizes, logs = [], [], []
    for part in parts:
        # workers exchange gradients only in the last part's backward pass
        last = part is parts[-1]
        with nullcontext() if last or not hasattr(model, "no_sync") else model.no_sync():
            loss, size, log = train_step(part)
        losses.append(loss.detach())  # so that the part's graph is freed
        sizes.append(size)
        logs.append(log)
    # criteria log sums over tokens, which fairseq adds up over workers and --update-freq, too
    return sum(losses), sum(sizes), {key: sum(log[key] for log in logs) for key in logs[0]}
