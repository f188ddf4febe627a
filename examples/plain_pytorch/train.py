"""Train a small Transformer-XL on the characters of a text, in plain PyTorch.

Parallel streams of the text are read segment by segment. Each block keeps a memory of the segment
before, as `docs/layers.md` tells.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.modules import TransformerXLBlock


class LanguageModel(nn.Module):
    """Blocks between an embedding and a linear output."""

    def __init__(
        self, symbols: int, width: int = 64, heads: int = 4, blocks: int = 2, mem_len: int = 64
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(
            TransformerXLBlock(width, heads, 2 * width, mem_len, dropout=0.1) for _ in range(blocks)
        )
        self.output = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor, memories: list | None = None) -> tuple[Tensor, list]:
        """Return scores (B, T, V) for tokens (B, T), and each block's memory for the next ones."""
        x, kept = self.embedding(tokens), []
        for block, memory in zip(self.blocks, memories or [None] * len(self.blocks), strict=True):
            x, memory = block(x, memory)
            kept.append(memory)
        return self.output(x), kept


def train(text: str, updates: int, streams: int = 8, segment: int = 64) -> list[float]:
    """Train a model and return the loss of each update, in bits a character.

    Args:
        text: what is learned.
        updates: how many segments are read; the text is begun again where it ends.
        streams: how many parts of the text are read side by side.
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
    memories, losses = None, []
    for update in range(updates):
        start = update * segment % length
        if start == 0:
            memories = None  # nothing comes before the start of the streams
        part = slice(start, start + segment)
        scores, memories = model(inputs[:, part], memories)
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
