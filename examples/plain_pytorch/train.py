"""Train a small Transformer-XL on the characters of a text, in plain PyTorch.

The text is read as parallel streams, segment by segment. The network returns the past of the next
segment with each, as `docs/layers.md` tells.

Shapes: B streams, T characters of a segment, V symbols.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.modules import Past, TransformerXL


class LanguageModel(nn.Module):
    """A Transformer-XL between an embedding and a linear output."""

    def __init__(self, symbols: int, width: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.network = TransformerXL(
            num_layers=2, embed_dim=width, num_heads=4, ffn_dim=2 * width, mem_len=64, dropout=0.1
        )
        self.output = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor, past: Past | None = None) -> tuple[Tensor, Past]:
        """Return scores (B, T, V) for tokens (B, T), and the past of the next ones."""
        y, past = self.network(self.embedding(tokens), past)
        return self.output(y), past


def train(text: str, updates: int, streams: int = 8, segment: int = 64) -> list[float]:
    """Train a model and return the loss of each update, in bits a character.

    Args:
        text: what is learned.
        updates: number of segments that are read; the text is begun again where it ends.
        streams: number of parts of the text that are read side by side.
        segment: characters of each stream that an update reads.

    Raises:
        ValueError: the text has no whole segment for each stream.
    """
    length = (len(text) - 1) // streams // segment * segment
    if length < 1:
        raise ValueError(
            f"the text has {len(text)} characters: {streams} streams of segments of {segment} take "
            f"{streams * segment + 1} or more"
        )
    numbers = {character: number for number, character in enumerate(sorted(set(text)))}
    tokens = torch.tensor([numbers[character] for character in text])
    inputs, targets = (
        tokens[first : first + streams * length].view(streams, length) for first in (0, 1)
    )
    model = LanguageModel(len(numbers))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    past, losses = None, []
    for update in range(updates):
        start = update * segment % length
        if start == 0:
            past = None  # nothing comes before the start of the streams
        part = slice(start, start + segment)
        scores, past = model(inputs[:, part], past)
        loss = F.cross_entropy(scores.flatten(0, 1), targets[:, part].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        losses.append(loss.item() / math.log(2))
        if (update + 1) % 50 == 0:
            mean = sum(losses[-50:]) / 50
            print(f"updates {update - 48} to {update + 1}: {mean:.3f} bits a character")
    return losses


def main() -> int:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a text in UTF-8")
    parser.add_argument("--updates", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    try:
        train(args.text.read_text(encoding="utf-8"), args.updates)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
