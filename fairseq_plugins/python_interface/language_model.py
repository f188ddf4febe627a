"""Trained language models from Python: score texts, splits and streams, and continue prompts.

Shapes: B texts, N tokens of a text, T tokens of a segment, C tokens of extended context.
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.search import Sampling
from fairseq.tasks import FairseqTask
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fairseq_plugins.fairseq_integration.options import flag
from fairseq_plugins.python_interface.lines import LineCoder
from fairseq_plugins.python_interface.scoring import (
    Hypothesis,
    LoadedModel,
    Score,
    check_at_least,
    score_features,
)
from fairseq_plugins.python_interface.text import TextCoder
from fairseq_plugins.segment_language_model.generation import PromptGenerator, SeededSampling
from fairseq_plugins.segment_language_model.past import Past
from fairseq_plugins.segment_language_model.split import load_tokens, log_unknown
from fairseq_plugins.segment_language_model.streams import StreamIterator, TokenStreams
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from fairseq_plugins.units import loss_unit

# streams or rows that score_split reads at once, where batch_size is not given
_ROWS = 8


class LanguageModel(LoadedModel):
    """A language model that scores and continues text.

    A newline is ``</s>``, as at the ends of lines in fairseq's data. Another ``</s>``, which is not
    scored, comes before the text. ``unit`` says what a symbol is; ``tokens_per_sample`` and
    ``extended_context`` are T and C, None for those of training. Segment models read on with their
    past; models of fairseq's ``language_modeling`` read each segment with its context only.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        task: FairseqTask,
        lines: LineCoder | None = None,
        unit: str = "words",
        allow_unknown: bool = False,
        tokens_per_sample: int | None = None,
        extended_context: int | None = None,
    ) -> None:
        super().__init__(model, task)
        self.text = TextCoder(task.source_dictionary, lines, allow_unknown)
        self.unit = loss_unit(unit)
        self.has_past = isinstance(task, SegmentLanguageModelingTask)
        options = task.cfg if self.has_past else task.args
        for name, value in {"add_bos_token": False, "output_dictionary_size": -1}.items():
            if getattr(options, name, value) != value:
                raise ValueError(
                    f"the model was trained with {flag(name)}, which text from Python does not "
                    "support: use fairseq-eval-lm and fairseq-generate"
                )
        self.segment = options.tokens_per_sample
        self.context = getattr(options, "extended_context", 0)
        self.segment, self.context = self._choose_lengths(tokens_per_sample, extended_context)

    def _choose_lengths(self, segment: int | None, context: int | None) -> tuple[int, int]:
        """Return T and C, by default the model's; check them against its positions and past."""
        segment = self.segment if segment is None else segment
        context = self.context if context is None else context
        check_at_least(1, tokens_per_sample=segment)
        check_at_least(0, extended_context=context)
        if self.has_past:
            network = self.model.decoder.network
            if context > 0 and network.mem_len > 0:
                raise ValueError(
                    f"extended_context is {context}, but the model's recurrence holds "
                    f"{network.mem_len} tokens already: leave it out, or give mem_len=0"
                )
            most = getattr(network.absolute_positions, "max_positions", None)
        else:
            most = self.model.max_positions()
        if most is not None and segment + context > most:
            raise ValueError(
                f"tokens_per_sample is {segment} and extended_context {context}: the model has "
                f"positions for {most} tokens, give no more together"
            )
        return segment, context

    def score(self, text: str | Sequence[str], batch_size: int = 16) -> Score | list[Score]:
        """Score a text, or several independent ones, as fairseq-eval-lm scores one stream.

        ``batch_size`` texts are computed at once; the scores do not depend on it.
        """
        if isinstance(text, str):
            return self.stream().score(text)
        check_at_least(1, batch_size=batch_size)
        tokens = [self.text.encode(one, f"text {i}") for i, one in enumerate(text, start=1)]
        scores: dict[int, Score] = {}
        order = sorted(range(len(tokens)), key=lambda number: -len(tokens[number]))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            read = TextStream(self, len(batch)).read([tokens[number] for number in batch])
            for number, losses in zip(batch, read, strict=True):
                scores[number] = self.as_score(tokens[number], losses)
        return [scores[number] for number in range(len(tokens))]

    def stream(self) -> TextStream:
        """Return a text to score piece by piece; each piece continues the pieces before it."""
        return TextStream(self)

    def as_score(self, tokens: Tensor, losses: Tensor) -> Score:
        """Return the score of tokens (N,) with losses (N,) in nats."""
        if unknown := int(tokens.eq(self.text.dictionary.unk()).sum()):
            log_unknown(unknown / len(tokens), len(tokens), "the text")
        return Score(self.text.symbols(tokens), -losses.cpu().numpy(), self.unit)

    def _read_split(
        self,
        split: str,
        batch_size: int | None = None,
        tokens_per_sample: int | None = None,
        extended_context: int | None = None,
        max_tokens: int | None = None,
    ) -> tuple[int, Iterable[dict[str, Any]], Callable[[int], int]]:
        check_at_least(1, batch_size=batch_size, max_tokens=max_tokens)
        segment, context = self._choose_lengths(tokens_per_sample, extended_context)
        dictionary = self.text.dictionary
        # fairseq's older tasks have args instead of cfg
        path = os.path.join((self.task.cfg or self.task.args).data, split)
        try:
            tokens = load_tokens(path, dictionary)[:max_tokens]
        except FileNotFoundError as error:
            raise ValueError(f"split {split}: {error}") from error
        if not self.has_past:
            rows = TokenStreams(tokens, dictionary, 1, segment, context)
            step = batch_size or _ROWS
            batches = (
                rows.collater([rows[row] for row in range(first, min(first + step, len(rows)))])
                for first in range(0, len(rows), step)
            )
            return len(tokens), batches, int
        if batch_size is not None and batch_size > len(tokens):
            raise ValueError(
                f"batch_size is {batch_size}: the split has {len(tokens)} tokens, and each stream "
                "takes one or more; give a smaller one"
            )
        streams = TokenStreams(tokens, dictionary, batch_size or 1, segment, context)
        return (
            len(tokens),
            StreamIterator(streams, 1, 0).next_epoch_itr(shuffle=False),
            # one stream's rows after another
            lambda row: row % streams.num_streams * len(streams) + row // streams.num_streams,
        )

    def generate(
        self, prompt: str | Sequence[str] = "", length: int = 100, **options: Any
    ) -> str | list[str]:
        """Return a prompt, or each of several, continued by ``length`` symbols.

        For the options see :meth:`hypotheses`.
        """
        for name in options.keys() - inspect.signature(self.hypotheses).parameters.keys():
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}")
        if isinstance(prompt, str):
            return self.hypotheses(prompt, length, **options)[0].text
        return [self.hypotheses(one, length, **options)[0].text for one in prompt]

    def hypotheses(
        self,
        prompt: str,
        length: int = 100,
        *,
        beam: int = 1,
        sampling: bool = False,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        no_repeat_ngram_size: int = 0,
        seed: int | None = None,
        stop_at_newline: bool = False,
    ) -> list[Hypothesis]:
        """Return the ``beam`` best continuations of a prompt, best first, with the prompt.

        Args:
            prompt: a text, which may be empty.
            length: number of symbols after the prompt.
            beam: width of the search.
            sampling: draw each symbol instead of searching; ``top_k`` and ``top_p`` imply this.
            top_k: draw from the k likeliest symbols.
            top_p: draw from the likeliest symbols that together have this probability.
            temperature: above 1 makes probabilities more even, below 1 less even; without
                sampling it changes what a beam of two or more finds, as in fairseq-interactive.
            no_repeat_ngram_size: repeat no sequence of this many symbols; 0 for no limit.
            seed: seed of the draws; None continues torch's random numbers.
            stop_at_newline: stop at the end of the line, if it comes before ``length``.
        """
        dictionary = self.text.dictionary
        sampling = sampling or top_k is not None or top_p is not None
        check_at_least(1, length=length, beam=beam, top_k=top_k)
        check_at_least(0, no_repeat_ngram_size=no_repeat_ngram_size, seed=seed)
        symbols = len(dictionary)
        nothing_drawn = "nothing is drawn: give sampling, top_k or top_p, or leave it out"
        for wrong, refusal in (
            (top_k and top_k > symbols, f"top_k is {top_k}: give at most the {symbols} symbols"),
            (top_p is not None and not 0 < top_p <= 1, f"top_p is {top_p}: it must be in (0, 1]"),
            (top_k and top_p, "top_k and top_p are both given: fairseq takes one, leave one out"),
            (
                not 0 < temperature < math.inf,
                f"temperature is {temperature}: it must be above 0, and finite",
            ),
            (seed is not None and not sampling, f"seed is {seed}, and {nothing_drawn}"),
            (
                temperature != 1 and not sampling and beam == 1,
                f"temperature is {temperature}, and {nothing_drawn}",
            ),
            (sampling and beam > 1, f"beam is {beam} with sampling: leave one of the two out"),
        ):
            if wrong:
                raise ValueError(refusal)
        tokens = self.text.encode(prompt, "the prompt") if prompt else torch.empty(0).long()
        if stop_at_newline and tokens.eq(dictionary.eos()).any():
            raise ValueError(
                "the prompt has a newline, and stop_at_newline is given: leave one out"
            )
        if len(tokens) + length >= self.model.max_positions():
            raise ValueError(
                f"length is {length} after a prompt of {len(tokens)} symbols: the model has "
                f"positions for {self.model.max_positions() - 1} symbols, give no more together"
            )
        search = Sampling(dictionary, top_k or -1, top_p or -1.0) if sampling else None
        if seed is not None:
            search = SeededSampling(dictionary, search, seed, self.device)
        generator = PromptGenerator(
            [self.model],
            dictionary,
            self.segment,
            running_text=not stop_at_newline,
            max_len_b=len(tokens) + length,
            no_repeat_ngram_size=no_repeat_ngram_size,
            beam_size=beam,
            temperature=temperature,
            search_strategy=search,
        )
        prefix = tokens.unsqueeze(0).to(self.device)
        (hypotheses,) = generator.continue_prompts(prefix, prefix.new_ones(1))
        return self._hypotheses(self.text, hypotheses)


class TextStream:
    """A text that a language model reads piece by piece and remembers, or B ``texts`` in parallel.

    Wherever the text is cut between two symbols, its pieces get the scores of the whole text: if a
    piece ends within a segment, the next piece reads this segment again, from the same past.
    """

    def __init__(self, model: LanguageModel, texts: int = 1) -> None:
        self._model = model
        self._read_so_far = 0
        # the past before the segment in which the text ended so far
        self._past: Past | None = None
        # tokens that are read again, from token _first - 1 on; </s> is token -1
        self._first = 0
        self._tokens = torch.full((texts, 1), model.text.dictionary.eos())

    def __len__(self) -> int:
        return self._read_so_far

    def score(self, text: str) -> Score:
        """Score the next piece of a single text."""
        tokens = self._model.text.encode(text)
        return self._model.as_score(tokens, self.read([tokens])[0])

    @torch.no_grad()
    def read(self, texts: list[Tensor]) -> list[Tensor]:
        """Return the losses in nats, fp32, of the next tokens (N,) of each of B texts.

        The texts must be equally long in all calls but the last.
        """
        segment, context = self._model.segment, self._model.context
        pad = self._model.text.dictionary.pad()
        new = pad_sequence(texts, batch_first=True, padding_value=pad)
        tokens = torch.cat([self._tokens, new], dim=1).to(self._model.device)
        done, total = self._read_so_far, self._read_so_far + new.size(1)
        past = self._past
        losses: list[list[Tensor]] = [[] for _ in texts]
        while done < total:
            start = done - done % segment
            end = min(start + segment, total)
            first = max(0, start - context)
            # token i of the text is tokens[:, i - self._first + 1]
            source = tokens[:, first - self._first : end - self._first]
            target = tokens[:, first - self._first + 1 : end - self._first + 1]
            scored = target.ne(pad)
            scored[:, : done - first] = False
            next_past = None
            if self._model.has_past:
                features, next_past = self._model.model.decoder.extract_features(source, past=past)
            else:
                features, _ = self._model.model(source, features_only=True)
            if end == start + segment:
                past = next_past
            parts = score_features(self._model.model, features, target, scored)
            for part, row in zip(parts.split(scored.sum(1).tolist()), losses, strict=True):
                row.append(part)
            done = end
        last = max(0, total - total % segment - context)
        self._tokens, self._first = tokens[:, last - self._first :].cpu(), last
        self._read_so_far, self._past = total, past
        return [torch.cat(row) for row in losses]
