"""A trained language model from Python: score texts and splits, continue prompts.

Shapes: B texts, N tokens of a text, T tokens of a segment, C tokens of extended context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_plugins.python_interface.loaded_model import (
    Batches,
    Hypothesis,
    LoadedModel,
    hypotheses,
)
from fairseq_plugins.python_interface.scoring import Score, warn_of_unknown
from fairseq_plugins.python_interface.text import TextCoder
from fairseq_plugins.python_interface.text_stream import Reader, TextStream
from fairseq_plugins.segment_language_model.generation import draw_prompts, end_by_length
from fairseq_plugins.segment_language_model.streams import RunningText
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from fairseq_plugins.segment_language_model.units import loss_unit

# fairseq's options of blocks that the text of a single call has no place for
_OF_BLOCKS = {"add_bos_token": False, "output_dictionary_size": -1}
# blocks at a time, where their number is not asked for
_BLOCKS = 8


class LanguageModel(LoadedModel):
    """A language model that scores and continues text.

    A newline in a text is ``</s>``, which ends lines in fairseq's data. Before the first token
    stands one more, which is not scored.

    Args:
        model: ready for inference.
        task: ``segment_language_modeling`` or ``language_modeling``.
        lines: makes symbols of a line and a line of symbols; None for words between blanks.
        unit: what a symbol is, which decides on the unit of the loss.
        allow_unknown: take symbols that the dictionary lacks for ``<unk>``, and not refuse them.
        tokens_per_sample: T; None for that of training.
        extended_context: C; None for that of training.
    """

    _does = "this is a language model, which does not translate"

    def __init__(
        self,
        model: BaseFairseqModel,
        task: FairseqTask,
        lines: Any = None,
        unit: str = "words",
        allow_unknown: bool = False,
        tokens_per_sample: int | None = None,
        extended_context: int | None = None,
    ) -> None:
        super().__init__(model, task)
        self.text = TextCoder(task.source_dictionary, lines, allow_unknown)
        self.unit = loss_unit(unit)
        self.reads_streams = isinstance(task, SegmentLanguageModelingTask)
        self._options = task.cfg if self.reads_streams else task.args
        self.segment = self._options.tokens_per_sample
        self.context = getattr(self._options, "extended_context", 0)
        self.segment, self.context = self._lengths(tokens_per_sample, extended_context)
        most = self.model.max_positions()
        if self.segment + self.context > most:
            raise ValueError(
                f"tokens_per_sample is {self.segment} and extended_context {self.context}: the "
                f"model has positions for {most} tokens, give no more in all"
            )

    def _lengths(self, segment: int | None, context: int | None) -> tuple[int, int]:
        """Return T and C where they are given, else those of the model."""
        segment = self.segment if segment is None else segment
        context = self.context if context is None else context
        for name, value, least in (
            ("tokens_per_sample", segment, 1),
            ("extended_context", context, 0),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
        if context > 0 and self.model.decoder.context.mem_len > 0:
            raise ValueError(
                f"extended_context is {context} for a model with a recurrence of "
                f"{self.model.decoder.context.mem_len} tokens, which would hold them twice: leave "
                "it out, or give mem_len=0"
            )
        return segment, context

    def check_blocks(self) -> None:
        """Raise ``ValueError`` for blocks that the text of a single call is none of."""
        for name, value in _OF_BLOCKS.items():
            if getattr(self._options, name, value) != value:
                raise ValueError(
                    f"the model was trained with --{name.replace('_', '-')}, which text from "
                    "Python has no place for: use fairseq-eval-lm and fairseq-generate"
                )

    def score(self, text: str | Sequence[str], batch_size: int = 16) -> Score | list[Score]:
        """Score a text, or each of several by itself: what fairseq-eval-lm gives for one stream.

        Args:
            text: a text, or several.
            batch_size: how many are computed at once, the longest first; no figure depends on it.
        """
        if isinstance(text, str):
            return self.stream().score(text)
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
        tokens = [self.text.encode(one, f"text {i}") for i, one in enumerate(text, start=1)]
        scores: dict[int, Score] = {}
        order = sorted(range(len(tokens)), key=lambda number: -len(tokens[number]))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            found = Reader(self, len(batch)).read([tokens[number] for number in batch])
            scores |= {
                number: self.score_of(tokens[number], found[i]) for i, number in enumerate(batch)
            }
        return [scores[number] for number in range(len(tokens))]

    def _read_split(
        self,
        split: str,
        batch_size: int | None = None,
        tokens_per_sample: int | None = None,
        extended_context: int | None = None,
        context_window: int = 0,
        max_tokens: int | None = None,
    ) -> tuple[np.ndarray, Batches]:
        segment, context = self._lengths(tokens_per_sample, extended_context)
        tokens = self._tokens(split)[:max_tokens]
        if self.reads_streams:
            if context_window > 0:
                raise ValueError(
                    f"context_window is {context_window}: the recurrence is the context of a "
                    "segment language model; leave it out"
                )
            positions = self.model.decoder.absolute_positions
            most = None if positions is None else positions.max_positions
        else:
            most = self.model.max_positions()
        if most is not None and segment + context > most:
            raise ValueError(
                f"tokens_per_sample is {segment} and extended_context {context}: the model was "
                f"trained with positions for {most} tokens; give that many at most"
            )
        if self.reads_streams:
            self._options.tokens_per_sample, self._options.extended_context = segment, context
            epoch = self.task.get_batch_iterator(RunningText(tokens), max_sentences=batch_size)
            streams, rows = epoch.dataset.num_streams, len(epoch.dataset)
            # the rows of a stream follow one another
            return tokens, Batches(
                epoch.next_epoch_itr(shuffle=False),
                lambda row: row % streams * rows + row // streams,
            )
        if not 0 <= context_window < segment:
            raise ValueError(
                f"context_window is {context_window}: it must be at least 0 and less than "
                f"tokens_per_sample, here {segment}, of which it is a part"
            )
        if max_tokens is not None:
            raise ValueError(f"max_tokens is {max_tokens} for blocks of text: leave it out")
        # as fairseq-eval-lm does: a block and its context are as long as a block alone
        self._options.tokens_per_sample = segment - context_window
        self.task.load_dataset(split)
        batches = self.task.eval_lm_dataloader(
            self.task.dataset(split),
            max_tokens=None,
            batch_size=batch_size or _BLOCKS,
            max_positions=self.model.max_positions(),
            num_workers=0,
            data_buffer_size=0,
            context_window=context_window,
        )
        return tokens, Batches(batches, int)

    def _scored(self, target: Tensor) -> Tensor:
        scored = super()._scored(target)
        if getattr(self._options, "add_bos_token", False):
            # no token of the split
            scored &= target.ne(self.text.dictionary.bos())
        return scored

    def stream(self) -> TextStream:
        """Return a text to be read piece by piece, each after all those before it."""
        return TextStream(self)

    def score_of(self, tokens: Tensor, losses: Tensor) -> Score:
        """Return the score of tokens (N,) with these losses in nats, (N,)."""
        warn_of_unknown(int(tokens.eq(self.text.dictionary.unk()).sum()), len(tokens))
        return Score(self.text.symbols(tokens), -losses.cpu().numpy(), self.unit)

    def generate(
        self, prompt: str | Sequence[str] = "", length: int = 100, **options: Any
    ) -> str | list[str]:
        """Continue a prompt, or each of several: the prompt and what follows it.

        Args:
            prompt: a text, which may be empty, or several.
            length: symbols after the prompt.
            options: as of :meth:`hypotheses`.
        """
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
        """Return continuations of a prompt, the best first, as many as ``beam``.

        fairseq's generator finds them; the model attends to its memory of what is before. Prompt
        and continuation are in text, symbols and log-probabilities.

        Args:
            prompt: a text, which may be empty.
            length: symbols after the prompt.
            beam: width of the search.
            sampling: draw each symbol, in place of searching; ``top_k`` and ``top_p`` do, too.
            top_k: draw from the so many likeliest symbols.
            top_p: draw from the likeliest symbols that have this probability together.
            temperature: above 1 for more even probabilities, below for less even ones.
            no_repeat_ngram_size: no sequence of so many symbols occurs twice, the prompt included;
                0 for no such limit.
            seed: of the draws, which leaves torch's own generator as it was; None to go on with it.
            stop_at_newline: end where the line ends, if that is before ``length``.
        """
        self.check_blocks()
        dictionary = self.text.dictionary
        sampling = sampling or top_k is not None or top_p is not None
        self._check_search(length, beam, sampling, top_k, top_p, temperature)
        if no_repeat_ngram_size < 0:
            raise ValueError(
                f"no_repeat_ngram_size is {no_repeat_ngram_size}: it must be at least 0"
            )
        tokens = self.text.encode(prompt, "the prompt") if prompt else torch.empty(0).long()
        if stop_at_newline and tokens.eq(dictionary.eos()).any():
            raise ValueError("the prompt has a newline, and stop_at_newline is given: drop one")
        most = len(tokens) + length
        if most + 1 > self.model.max_positions():
            raise ValueError(
                f"length is {length} after a prompt of {len(tokens)} symbols: the model has "
                f"positions for {self.model.max_positions() - 1} together, give less"
            )
        options = SimpleNamespace(
            beam=beam,
            max_len_b=most,
            min_len=1,
            sampling=sampling,
            sampling_topk=top_k or -1,
            sampling_topp=top_p or -1.0,
            temperature=temperature,
            no_repeat_ngram_size=no_repeat_ngram_size,
        )
        # <pad> never occurs in text: nothing but the length ends what waits for it
        end = {} if stop_at_newline else {"extra_gen_cls_kwargs": {"eos": dictionary.pad()}}
        generator = self.task.build_generator([self.model], options, **end)
        if not stop_at_newline:
            end_by_length(generator)
        if sampling:
            draw_prompts(generator)
        prefix = tokens.unsqueeze(0).to(self.device)
        source = torch.cat([prefix.new_full((1, 1), dictionary.eos()), prefix], dim=1)
        lengths = source.new_tensor([source.size(1)])
        sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
        with seeded(seed, self.device):
            (found,) = generator.generate(
                [self.model], sample, prefix_tokens=prefix, bos_token=dictionary.eos()
            )
        return hypotheses(self.text, found)

    def _check_search(
        self,
        length: int,
        beam: int,
        sampling: bool,
        top_k: int | None,
        top_p: float | None,
        temperature: float,
    ) -> None:
        """Raise ``ValueError`` for what no search can have."""
        for name, value in (("length", length), ("beam", beam), ("top_k", top_k)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        if top_k is not None and top_k > len(self.text.dictionary):
            raise ValueError(
                f"top_k is {top_k}: there are {len(self.text.dictionary)} symbols, give no more"
            )
        if top_p is not None and not 0 < top_p <= 1:
            raise ValueError(f"top_p is {top_p}: give a number above 0, at most 1")
        if top_k is not None and top_p is not None:
            raise ValueError("top_k and top_p are both given: fairseq takes one, leave one out")
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}: it must be above 0")
        if sampling and beam > 1:
            raise ValueError(
                f"beam is {beam} with sampling, which searches nothing: leave one out, and call "
                "again for another sample"
            )


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers in the block and put them back after it; nothing for None."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield
