"""What a model reads of a text, token by token, small enough for a page.

Of all weights the largest are kept, as bytes: as many as the page has room for, and each row's
largest. Sums and means are of all weights.

Shapes: N tokens of the text, T tokens of a segment, H heads, E weights of a row, V symbols.
"""

from __future__ import annotations

import base64
import json
import zlib
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairseq_plugins.all_attention.adaptive_span import AdaptiveSpan
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from scripts._shared.layer_reads import Layer, Reads, layers, record

# how much of the page a token's weights take, in all layers and heads
BYTES_PER_TOKEN = 1100
LIKELIEST = 5
_PIECE = 64  # tokens whose log-probabilities (V,) are computed at once
_ATTEMPTS = 4  # to fit the weights into the page: their size is known once they are compressed
_CURVE = 100  # points of a memory's curve


def pack(array: Any) -> dict[str, str]:
    """Return an array for the page's script: compressed, in base64, with its type."""
    array = np.ascontiguousarray(array)
    data = base64.b64encode(zlib.compress(array.tobytes(), 9)).decode()
    return {"type": array.dtype.name, "data": data}


class WeightTable:
    """The weights of rows, one row for each token and head: where they point, and how large."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.counts: list[np.ndarray] = []
        self.indices: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []
        self.largest: list[np.ndarray] = []

    def add(self, indices: Tensor, weights: Tensor) -> None:
        """Add the rows of some tokens, both (T, H, E)."""
        flat = weights.flatten(0, 1).float()
        largest = torch.zeros_like(flat, dtype=torch.bool)
        largest.scatter_(1, flat.argmax(1, keepdim=True), True)
        largest &= flat > 0
        keep = (flat > 0.5 / 255) | largest
        indices = indices.expand_as(weights).flatten(0, 1)
        self.counts.append(keep.sum(1).numpy())
        self.indices.append(indices[keep].numpy())
        self.weights.append(flat[keep].numpy())
        self.largest.append(largest[keep].numpy())

    def packed(self, least: float) -> dict[str, Any]:
        """Return the weights from ``least`` on, and each row's largest."""
        counts, indices, weights, largest = map(
            np.concatenate, (self.counts, self.indices, self.weights, self.largest)
        )
        keep = (weights >= least) | largest
        rows = np.repeat(np.arange(len(counts)), counts)[keep]
        indices = indices[keep]
        small = np.uint16 if indices.max(initial=0) < 2**16 else np.uint32
        return {
            "heads": self.heads,
            "counts": pack(np.bincount(rows, minlength=len(counts)).astype(np.uint16)),
            "index": pack(indices.astype(small)),
            "weight": pack(np.rint(weights[keep] * 255).clip(1, 255).astype(np.uint8)),
        }


class TextReads:
    """What the layers of a model read of a text; an observer for :func:`.record`.

    ``queries`` is how many of a call's tokens count, the last ones; None for all. Of a model that
    ``translates``, attention to the source counts, by the decoder and within the encoder.
    """

    def __init__(self, translates: bool = False) -> None:
        self.translates = translates
        self.queries: int | None = None
        self.tables: dict[tuple[str, str], WeightTable] = {}
        self.sums: dict[str, Tensor] = {}
        self.shares: dict[str, list[Tensor]] = {}
        self.memories: dict[str, MemoryUsage] = {}

    def __call__(self, layer: Layer, reads: Reads) -> None:
        """Add what a layer read in one call, of one text."""
        label = str(layer.number)
        if reads.slots is not None:
            self._add_slots(layer, reads)
        if reads.vectors is not None:
            # (H, 1, T, N) -> (T, H, N)
            vectors = reads.vectors[:, 0, -(self.queries or 0) :].transpose(0, 1)
            self._table("vectors", label, vectors.size(1)).add(
                torch.arange(vectors.size(2)), vectors
            )
            self.shares.setdefault(label, []).append(vectors.sum(2))
        of_source = layer.part == "encoder" or "encoder_attn" in layer.path
        if reads.keys is None or self.translates != of_source:
            return
        keys = reads.keys[:, 0, -(self.queries or 0) :].transpose(0, 1)  # (T, H, S)
        if self.translates:
            kind = "encoder" if layer.part == "encoder" else "source"
            self._table(kind, label, keys.size(1)).add(torch.arange(keys.size(2)), keys)
            return
        rows, columns = keys.size(0), keys.size(2)
        distance = torch.arange(columns - rows, columns)[:, None] - torch.arange(columns)
        self._table("tokens", label, keys.size(1)).add(distance[:, None].clamp(min=0), keys)
        self._add_distances(label, distance, keys)

    def _table(self, kind: str, layer: str, heads: int) -> WeightTable:
        return self.tables.setdefault((kind, layer), WeightTable(heads))

    def _add_distances(self, layer: str, distance: Tensor, keys: Tensor) -> None:
        """Add the weights (T, H, S) by distance, and the number of queries that reach it."""
        seen = distance >= 0
        rows = torch.cat([keys.transpose(0, 1)[:, seen], torch.ones(1, int(seen.sum()))]).double()
        sums = torch.zeros(len(rows), keys.size(2)).double()
        sums.index_add_(1, distance[seen], rows)
        earlier = self.sums.get(layer, sums.new_zeros(len(rows), 0))
        longest = max(earlier.size(1), sums.size(1))
        padded = [nn.functional.pad(x, (0, longest - x.size(1))) for x in (earlier, sums)]
        self.sums[layer] = padded[0] + padded[1]

    def _add_slots(self, layer: Layer, reads: Reads) -> None:
        """Add the slots that each token's heads read, and sum the reads of each slot, (H, K)."""
        slots, weights = (x[-(self.queries or 0) :] for x in (reads.slots, reads.slot_weights))
        if layer.part == "decoder":
            self._table("slots", str(layer.number), slots.size(1)).add(slots, weights)
        name = f"memory in {layer.part} layer {layer.number}"
        if name not in self.memories:
            self.memories[name] = MemoryUsage(len(layer.module.values.weight), slots.size(1))
        self.memories[name].record(slots, weights)

    def _pack_tables(self, room: int) -> dict[str, dict[str, Any]]:
        """Return the tables by kind and layer, with as many weights as there is room for."""
        parts = [part for table in self.tables.values() for part in table.weights]
        weights = np.concatenate(parts or [np.zeros(0)])
        most = room
        for _ in range(_ATTEMPTS):
            least = np.partition(weights, -most)[-most] if len(weights) > most else 0.0
            tables: dict[str, dict[str, Any]] = {}
            for (kind, layer), table in self.tables.items():
                tables.setdefault(kind, {})[layer] = table.packed(least)
            size = len(json.dumps(tables))
            if size <= room:
                break
            most = max(1, int(0.95 * most * room / size))
        return tables

    def packed(self, num_tokens: int) -> dict[str, Any]:
        """Return all of it for the page."""
        tables = self._pack_tables(BYTES_PER_TOKEN * num_tokens)
        distances = {layer: _by_distance(sums) for layer, sums in self.sums.items()}
        heads = [
            (mean, layer, head)
            for layer, figures in distances.items()
            for head, mean in enumerate(figures["mean"])
        ]
        # without distances, the first head of the last layer
        heads += [(0.0, layer, 0) for layer in [None, *tables.get("source", ())][-1:]]
        _, *first = max(heads, key=lambda head: head[0])
        return {
            "tables": tables,
            "first": first,  # the head to show first, which looks farthest
            "distances": distances,
            # (N, H) -> (H,)
            "shares": {
                layer: torch.cat(parts).mean(0).tolist() for layer, parts in self.shares.items()
            },
            "memories": {name: _describe(memory.reads) for name, memory in self.memories.items()},
        }


def _by_distance(sums: Tensor) -> dict[str, Any]:
    """Return each head's mean distance, and its mean weight at each distance."""
    weights, queries = sums[:-1], sums[-1]
    distances = torch.arange(weights.size(1))
    totals = weights.sum(1)
    means = (weights @ distances.double()) / totals.clamp(min=1e-12)
    return {
        "mean": means.tolist(),
        "longest": weights.size(1),
        "weight": pack((weights / queries.clamp(min=1)).float().numpy()),
    }


def _describe(reads: Tensor) -> dict[str, Any]:
    """Return usage, divergence and the curve of the reads (H, K) of a memory."""
    everything = reads.sum(0)

    def curve(z: Tensor) -> dict[str, list[float]]:
        used = z[z > 0].sort(descending=True).values
        ranks = np.unique(np.geomspace(1, len(used), _CURVE).round().astype(int))
        shares = used[torch.from_numpy(ranks - 1)] / used.sum()
        return {"x": ranks.tolist(), "y": [float(f"{y:.4g}") for y in shares]}

    named = [("all heads", everything)]
    named += [(f"head {number}", head) for number, head in enumerate(reads, start=1)]
    return {
        "slots": len(everything),
        "rows": [(name, usage(z), kl_from_uniform(z)) for name, z in named],
        "chart": {
            "title": "reads by slot",
            "xLabel": "slots, the most read first",
            "yLabel": "share of the reads",
            "xLog": True,
            "yLog": True,
            "series": [
                {"name": name, "colour": colour, **curve(z)}
                for colour, (name, z) in enumerate(named)
            ],
        },
    }


def read_text(
    loaded: Any,
    tokens: Tensor,
    with_past: bool = True,
    reads: TextReads | None = None,
    start: int = 0,
) -> dict[str, Any]:
    """Return how a language model predicts each token (N,) of a text, which ``</s>`` precedes.

    Without the past, each segment is a text of its own. ``reads`` notes what the layers read. The
    tokens before ``start``, a multiple of the segment, are read and left out of the figures.
    """
    source = torch.cat([tokens.new_tensor([loaded.text.dictionary.eos()]), tokens[:-1]])
    model, past, features = loaded.model, None, []
    with torch.no_grad():
        for begin in range(
            0 if with_past and loaded.has_past else start, len(tokens), loaded.segment
        ):
            first = max(0, begin - loaded.context) if with_past else begin
            segment = source[None, first : begin + loaded.segment]
            length = segment.size(1) - (begin - first)
            shown = reads if begin >= start else None
            if shown is not None:
                shown.queries = length
            with record(model, shown) if shown is not None else nullcontext():
                if loaded.has_past:
                    read, past = model.decoder.extract_features(
                        segment, past=past if with_past else None
                    )
                else:
                    read, _ = model(segment, features_only=True)
            if begin >= start:
                features.append(read[0, -length:])
    return predictions(model, torch.cat(features), tokens[start:])


def read_pair(loaded: Any, source: Tensor, target: Tensor, reads: TextReads) -> dict[str, Any]:
    """Return how a translation model predicts each token (N,) of ``target``, ``</s>`` included."""
    shifted = torch.cat([target[-1:], target[:-1]])
    with torch.no_grad(), record(loaded.model, reads):
        features, _ = loaded.model(
            source[None], torch.tensor([len(source)]), shifted[None], features_only=True
        )
    return predictions(loaded.model, features[0], target)


@torch.no_grad()
def predictions(model: nn.Module, features: Tensor, tokens: Tensor) -> dict[str, Any]:
    """Return the probability and rank of each token (N,), and the likeliest; and the mean loss.

    ``features`` (N, d) are the last layer's output.
    """
    columns: list[list[Tensor]] = [[], [], [], []]
    pieces = zip(features.split(_PIECE), tokens.unsqueeze(1).split(_PIECE), strict=True)
    for piece, target in pieces:
        output = model.decoder.output_layer(piece[None]), None
        log_probs = model.get_normalized_probs(output, log_probs=True)[0].float()  # (n, V)
        target_log_probs = log_probs.gather(1, target)
        likeliest = log_probs.topk(min(LIKELIEST, log_probs.size(1)))
        rank = (log_probs > target_log_probs).sum(1) + 1
        results = target_log_probs, rank, likeliest.indices, likeliest.values.exp()
        for column, result in zip(columns, results, strict=True):
            column.append(result)
    target_log_probs, rank, symbols, probabilities = map(torch.cat, columns)
    return {
        "nats": -float(target_log_probs.double().mean()),
        "log_probs": target_log_probs[:, 0].numpy(),
        "rank": rank.numpy().astype(np.uint32),
        "likeliest": symbols.numpy().astype(np.uint32),
        "likely": probabilities.numpy(),
    }


def learned_spans(model: nn.Module) -> list[dict[str, Any]]:
    """Return each layer's learned spans in tokens, without the ramp, z, and with it."""
    return [
        {
            "layer": str(number),
            "ramp": span.ramp,
            "spans": (span.value * span.max_span).tolist(),
            "seen": span.tokens().tolist(),
        }
        for _, number, _, span in layers(model, AdaptiveSpan)
    ]


def branch_weights(model: nn.Module) -> list[dict[str, Any]]:
    """Return κ and α of each layer's branches."""
    rows = []
    for part, number, path, weights in layers(model, BranchWeights):
        symbol = {"kappa": "κ", "alpha": "α"}[weights.name.removesuffix("_logits")]
        attention = " self-attention" if part == "decoder" and "self_attn" in path else ""
        title = f"{symbol}, {part} {number}{attention}"
        rows.append({"title": title, "weights": weights.learned().tolist()})
    return rows
