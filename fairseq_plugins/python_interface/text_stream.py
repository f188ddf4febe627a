"""A text that a language model reads piece by piece: a book, whose scores are those of the whole.

Shapes: B texts, N tokens of a piece, T tokens of a segment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_plugins.python_interface.scoring import Score, score_features
from fairseq_plugins.segment_language_model.recurrence import Recurrence

if TYPE_CHECKING:
    from fairseq_plugins.python_interface.language_model import LanguageModel


class TextStream:
    """A text that a language model reads piece by piece, with the memory of all before.

    The scores of its pieces are those of the whole text, wherever it is cut between two symbols.
    For that a segment that a piece ends within is read again with the next piece.

    Args:
        model: reads it.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._reader = Reader(model, 1)

    def __len__(self) -> int:
        return self._reader.read_so_far

    def score(self, text: str) -> Score:
        """Score the next piece."""
        tokens = self._model.text.encode(text)
        return self._model.score_of(tokens, self._reader.read([tokens])[0])


class Reader:
    """Reads B texts in segments from their beginnings, each in a recurrence of its own.

    Args:
        model: reads them.
        texts: B.

    Attributes:
        read_so_far: tokens of each text.
    """

    def __init__(self, model: LanguageModel, texts: int) -> None:
        model.check_blocks()
        self._loaded = model
        self._recurrence = Recurrence()
        self.read_so_far = 0
        # the tokens from _first - 1 on that are read again, the first of all after </s>
        self._first = 0
        self._kept = torch.full((texts, 1), model.text.dictionary.eos())

    @torch.no_grad()
    def read(self, texts: list[Tensor]) -> list[Tensor]:
        """Return the losses in nats of the next tokens of each text, in single precision.

        Only the last call may bring more of some texts than of others.

        Args:
            texts: B of (N,).
        """
        loaded = self._loaded
        pad = loaded.text.dictionary.pad()
        new = pad_sequence(texts, batch_first=True, padding_value=pad)
        tokens = torch.cat([self._kept, new], dim=1).to(loaded.device)
        done, total = self.read_so_far, self.read_so_far + new.size(1)
        losses: list[list[Tensor]] = [[] for _ in texts]
        while done < total:
            start = done - done % loaded.segment
            end = min(start + loaded.segment, total)
            first = max(0, start - loaded.context)
            # token i of the text is tokens[:, i - self._first + 1]
            source = tokens[:, first - self._first : end - self._first]
            target = tokens[:, first - self._first + 1 : end - self._first + 1]
            scored = target.ne(pad)
            scored[:, : done - first] = False
            found = score_features(loaded.model, self._features(source, start), target, scored)
            for part, row in zip(found.split(scored.sum(1).tolist()), losses, strict=True):
                row.append(part)
            done = end
        last = max(0, total - total % loaded.segment - loaded.context)
        self._kept, self._first = tokens[:, last - self._first :].cpu(), last
        self.read_so_far = total
        return [torch.cat(row) for row in losses]

    def _features(self, source: Tensor, start: int) -> Tensor:
        if not self._loaded.reads_streams:
            return self._loaded.model(source, features_only=True)[0]
        recurrence = None if self._loaded.context > 0 else self._recurrence
        decoder = self._loaded.model.decoder
        return decoder.extract_features(source, recurrence=recurrence, start=start)[0]
