"""Reading the prompts of a generation, in few calls, and then what is generated.

Shapes: B prompts, P tokens of a prompt, R texts (B times the beams), T tokens, V symbols.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import EnsembleModel
from torch import Tensor

from fairseq_plugins.segment_language_model.past import Past

# how many log-probabilities of a prompt are computed at once
_LOG_PROBABILITIES = 2**26


class PromptedModels(EnsembleModel):
    """fairseq's ensemble for one generation; it has read the prompts before the search begins.

    ``tokens`` (R, …) are all that it has read, ``prompt_scores`` (B, P) the log-probabilities of
    the prompts.

    Args:
        tokens: ``</s>`` and the prompts, (B, P + 1).
        segment: T of the segments in which models with recurrence read prompts.
        temperature: divides log-probabilities, which are then normalised again.
        end: the number of symbols that follow a prompt in running text; None for other text.
        context: tokens that a model without recurrence reads again before each segment.
    """

    def __init__(
        self,
        models: list[BaseFairseqModel],
        tokens: Tensor,
        segment: int,
        temperature: float = 1.0,
        end: int | None = None,
        context: int = 0,
    ) -> None:
        super().__init__(models)
        self.tokens = tokens
        # in single precision, a smaller one would be 0
        self.temperature = max(temperature, 1e-30)
        self.end = end
        self.readers = [
            SegmentReader(model, segment, context)
            if hasattr(model.decoder, "network")
            else TokenReader(model)
            for model in models
        ]
        scores, following = zip(*map(self._read_prompts, self.readers), strict=True)
        self.prompt_scores = _average(scores)
        # what follows the prompts, until the search takes it
        self.following: Tensor | None = _average(following)
        self.num_symbols = following[0].size(-1)

    def _read_prompts(self, reader: SegmentReader | TokenReader) -> tuple[Tensor, Tensor]:
        """Return a model's log-probabilities of the prompts (B, P), and after them (B, V)."""
        targets, scores, start = self.tokens[:, 1:].unsqueeze(-1), [], 0
        for log_probs in map(self._tempered, reader.read_prompts(self.tokens)):
            part = targets[:, start : start + log_probs.size(1)]
            scores.append(log_probs[:, : part.size(1)].gather(-1, part).squeeze(-1))
            start += log_probs.size(1)
        return torch.cat(scores, dim=1), log_probs[:, -1]

    def _tempered(self, log_probs: Tensor) -> Tensor:
        if self.temperature == 1:
            return log_probs  # to the last bit
        # the likeliest symbol's 0 stays 0, however low the temperature
        below_best = log_probs - log_probs.amax(-1, keepdim=True)
        return (below_best / self.temperature).log_softmax(-1)

    def forward_encoder(self, net_input: dict[str, Any]) -> PromptedModels:
        """Return the ensemble, for fairseq the encoder's output."""
        return self

    def reorder_encoder_out(self, encoder_out: PromptedModels, order: Tensor) -> PromptedModels:
        """Make text ``order[i]`` text i."""
        self.tokens = self.tokens.index_select(0, order)
        if self.following is not None:
            self.following = self.following.index_select(0, order)
        for reader in self.readers:
            reader.select(order)
        return self

    def reorder_incremental_state(self, incremental_states: object, order: Tensor) -> None:
        """Do nothing, as readers hold the states."""

    def forward_decoder(self, tokens: Tensor, *unused: object) -> tuple[Tensor, None]:
        """Return log-probabilities (R, V) of what follows ``tokens``, ``</s>`` and new symbols.

        Running text has a further symbol, its end: certain at the end, before it impossible.
        """
        if tokens.size(1) - 1 == self.end:
            log_probs = torch.full((len(tokens), self.num_symbols), -math.inf, device=tokens.device)
            return F.pad(log_probs, (0, 1)), None
        following, self.following = self.following, None
        if following is None:
            self.tokens = torch.cat([self.tokens, tokens[:, -1:]], dim=1)
            outputs = (next(reader.read(self.tokens)) for reader in self.readers)
            following = _average([self._tempered(each)[:, -1] for each in outputs])
        return F.pad(following, (0, 0 if self.end is None else 1), value=-math.inf), None


def _average(log_probs: Sequence[Tensor]) -> Tensor:
    """Return the logarithm of the models' mean probabilities."""
    if len(log_probs) == 1:
        return log_probs[0]
    return torch.stack([*log_probs]).logsumexp(0) - math.log(len(log_probs))


class SegmentReader:
    """A segment model, which reads prompts in segments, and the past of its texts."""

    def __init__(self, model: BaseFairseqModel, segment: int, context: int = 0) -> None:
        self.model, decoder = model, model.decoder
        self.segment, self.context = segment, context
        self.recurrent = decoder.network.mem_len > 0
        # a model without recurrence sees as much as in training
        self.past_length = decoder.network.mem_len or decoder.segment - 1
        self.past: Past | None = None

    def read_prompts(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield log-probabilities (B, t, V) of what follows each of the ``tokens`` (B, T).

        As in evaluation, a model without recurrence reads each segment after its context. Then it
        reads the last tokens once more, as many as in training, so that what follows sees all.
        """
        length = tokens.size(1)
        for end in range(self.segment, length + self.segment, self.segment):
            start, end = end - self.segment, min(length, end)
            if self.recurrent:
                yield from self.read(tokens[:, :end], end - start)
            else:
                self.past = None
                first = max(0, start - self.context)
                yield from self.read(tokens[:, first:end], end - first, end - start)
        seen = min(length, self.past_length + 1)
        if not self.recurrent and (length - 1) % self.segment + 1 < seen:
            self.past = None
            *_, last = self.read(tokens[:, length - seen :], seen)
            yield last[:, -1:]

    def read(self, tokens: Tensor, new: int = 1, scored: int = 0) -> Iterator[Tensor]:
        """Yield log-probabilities (R, t, V) of what follows each ``new`` one of ``tokens`` (R, T).

        The others have been read before. Only the last ``scored`` are scored, if not 0.
        """
        decoder, segment = self.model.decoder, tokens[:, tokens.size(1) - new :]
        features, self.past = decoder.extract_features(
            segment, past=self.past, keep=self.past_length
        )
        at_once = max(1, _LOG_PROBABILITIES // (len(tokens) * len(decoder.dictionary)))
        for part in features[:, -scored:].split(at_once, dim=1):
            output = decoder.output_layer(part), None
            yield self.model.get_normalized_probs(output, log_probs=True, sample=None)

    def select(self, order: Tensor) -> None:
        """Make text ``order[i]`` text i."""
        self.past = None if self.past is None else self.past.select(order)


class TokenReader:
    """A language model of fairseq's, whose incremental decoder reads token by token."""

    def __init__(self, model: BaseFairseqModel) -> None:
        self.model = model
        self.state: dict[str, Any] = {}

    def read_prompts(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield log-probabilities (B, 1, V) of what follows each of the ``tokens`` (B, T)."""
        for end in range(1, tokens.size(1) + 1):
            yield from self.read(tokens[:, :end])

    def read(self, tokens: Tensor) -> Iterator[Tensor]:
        """Yield log-probabilities (R, 1, V) of what follows ``tokens`` (R, T); one is new."""
        output = self.model.decoder(tokens, incremental_state=self.state)[0], None
        yield self.model.get_normalized_probs(output, log_probs=True, sample=None)

    def select(self, order: Tensor) -> None:
        """Make text ``order[i]`` text i."""
        self.model.decoder.reorder_incremental_state_scripting(self.state, order)
