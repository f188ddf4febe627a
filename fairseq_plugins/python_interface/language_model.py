"""A trained language model from Python: score texts, splits and streams, continue prompts.

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
from torch.nn.utils.rnn import pad_sequence

from fairseq_plugins.fairseq_integration.dictionaries import log_unknown
from fairseq_plugins.fairseq_integration.error_messages import flag
from fairseq_plugins.python_interface.scoring import (
    Batches,
    Hypothesis,
    LoadedModel,
    Score,
    check_at_least,
    score_features,
)
from fairseq_plugins.python_interface.text import TextCoder
from fairseq_plugins.segment_language_model.evaluation import loss_unit
from fairseq_plugins.segment_language_model.generation import draw_prompts, end_by_length
from fairseq_plugins.segment_language_model.recurrence import Recurrence
from fairseq_plugins.segment_language_model.streams import RunningText
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask

# fairseq's options of blocks that the text of a single call has no place for
_OF_BLOCKS = {"add_bos_token": False, "output_dictionary_size": -1}
# blocks at a time, by default
_BLOCKS = 8


class LanguageModel(LoadedModel):
    """A language model that scores and continues text.

    A newline in a text is ``</s>``, which ends lines in fairseq's data. Before the first token
    stands another ``</s>``, which is not scored. ``unit`` is what a symbol is; T and C,
    ``tokens_per_sample`` and ``extended_context``, are those of training where they are None.
    """

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
        self.segment, self.context = self._lengths(
            tokens_per_sample, extended_context, self.model.max_positions()
        )

    def _lengths(self, segment: int | None, context: int | None, most: int) -> tuple[int, int]:
        """Return T and C where they are given, else those of the model; ``most`` tokens in all."""
        segment = self.segment if segment is None else segment
        context = self.context if context is None else context
        check_at_least(1, tokens_per_sample=segment)
        check_at_least(0, extended_context=context)
        if context > 0 and self.model.decoder.context.mem_len > 0:
            raise ValueError(
                f"extended_context is {context} for a model with a recurrence of "
                f"{self.model.decoder.context.mem_len} tokens, which would hold them twice: leave "
                "it out, or give mem_len=0"
            )
        if segment + context > most:
            raise ValueError(
                f"tokens_per_sample is {segment} and extended_context {context}: the model has "
                f"positions for {most} tokens, give no more in all"
            )
        return segment, context

    def check_blocks(self) -> None:
        """Refuse a model of blocks that begin with a symbol, or end before all symbols."""
        for name, value in _OF_BLOCKS.items():
            if getattr(self._options, name, value) != value:
                raise ValueError(
                    f"the model was trained with {flag(name)}, which text from Python has no "
                    "place for: use fairseq-eval-lm and fairseq-generate"
                )

    def score(self, text: str | Sequence[str], batch_size: int = 16) -> Score | list[Score]:
        """Score a text, or each of several by itself: what fairseq-eval-lm gives for one stream.

        ``batch_size`` texts are computed at once; no figure depends on it.
        """
        if isinstance(text, str):
            return self.stream().score(text)
        check_at_least(1, batch_size=batch_size)
        tokens = [self.text.encode(one, f"text {i}") for i, one in enumerate(text, start=1)]
        scores: dict[int, Score] = {}
        order = sorted(range(len(tokens)), key=lambda number: -len(tokens[number]))
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            found = TextStream(self, len(batch)).read([tokens[number] for number in batch])
            for number, losses in zip(batch, found, strict=True):
                scores[number] = self.score_of(tokens[number], losses)
        return [scores[number] for number in range(len(tokens))]

    def stream(self) -> TextStream:
        """Return a text to be read piece by piece, each after all those before it."""
        return TextStream(self)

    def score_of(self, tokens: Tensor, losses: Tensor) -> Score:
        """Return the score of tokens (N,) with these losses in nats, (N,)."""
        log_unknown(int(tokens.eq(self.text.dictionary.unk()).sum()), len(tokens), "the text")
        return Score(self.text.symbols(tokens), -losses.cpu().numpy(), self.unit)

    def _read_split(
        self,
        split: str,
        batch_size: int | None = None,
        tokens_per_sample: int | None = None,
        extended_context: int | None = None,
        context_window: int = 0,
        max_tokens: int | None = None,
    ) -> tuple[np.ndarray, Batches]:
        most = self.model.max_positions()
        if self.reads_streams:
            # others than learned positions have no end
            positions = getattr(self.model.decoder.absolute_positions, "max_positions", None)
            most = 10**9 if positions is None else positions
        segment, context = self._lengths(tokens_per_sample, extended_context, most)
        tokens = self._tokens(split)[:max_tokens]
        if self.reads_streams:
            if context_window > 0:
                raise ValueError(
                    f"context_window is {context_window}: the recurrence is the context of a "
                    "segment language model; leave it out"
                )
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
        # as in fairseq-eval-lm: a block and its context are as long as a block alone
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

    def generate(
        self, prompt: str | Sequence[str] = "", length: int = 100, **options: Any
    ) -> str | list[str]:
        """Continue a prompt, or each of several, by ``length`` symbols: return it and what follows.

        The options are those of :meth:`hypotheses`.
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
        """Return continuations of a prompt, prompt included, the best first, as many as ``beam``.

        fairseq's generator finds them; the model attends to its memory of what is before.

        Args:
            prompt: a text, which may be empty.
            length: symbols after the prompt.
            beam: width of the search.
            sampling: draw each symbol instead of searching, as ``top_k`` and ``top_p`` do, too.
            top_k: draw from this many of the likeliest symbols.
            top_p: draw from the likeliest symbols that have this probability together.
            temperature: above 1 for more even probabilities, below for less even ones.
            no_repeat_ngram_size: no sequence of this many symbols occurs twice; 0 for no limit.
            seed: of the draws; None to go on with torch's own generator.
            stop_at_newline: end where the line ends, if that is before ``length``.
        """
        self.check_blocks()
        dictionary = self.text.dictionary
        sampling = sampling or top_k is not None or top_p is not None
        check_at_least(1, length=length, beam=beam, top_k=top_k)
        check_at_least(0, no_repeat_ngram_size=no_repeat_ngram_size)
        symbols = len(dictionary)
        for wrong, refusal in (
            (top_k and top_k > symbols, f"top_k is {top_k}: give at most the {symbols} symbols"),
            (top_p is not None and not 0 < top_p <= 1, f"top_p is {top_p}: it must be in (0, 1]"),
            (top_k and top_p, "top_k and top_p are both given: fairseq takes one, leave one out"),
            (temperature <= 0, f"temperature is {temperature}: it must be above 0"),
            (sampling and beam > 1, f"beam is {beam} with sampling: leave one of the two out"),
        ):
            if wrong:
                raise ValueError(refusal)
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
        return self._hypotheses(self.text, found)


class TextStream:
    """A text that a language model reads piece by piece, with the memory of all before.

    The scores of its pieces are those of the whole text, wherever it is cut between two symbols.
    For that a segment that a piece ends within is read again with the next piece. B ``texts`` are
    read side by side.
    """

    def __init__(self, model: LanguageModel, texts: int = 1) -> None:
        model.check_blocks()
        self._model = model
        self._recurrence = Recurrence()
        self._read_so_far = 0
        # the tokens from _first - 1 on that are read again, the first of all after </s>
        self._first = 0
        self._kept = torch.full((texts, 1), model.text.dictionary.eos())

    def __len__(self) -> int:
        return self._read_so_far

    def score(self, text: str) -> Score:
        """Score the next piece of a single text."""
        tokens = self._model.text.encode(text)
        return self._model.score_of(tokens, self.read([tokens])[0])

    @torch.no_grad()
    def read(self, texts: list[Tensor]) -> list[Tensor]:
        """Return the losses in nats of the next tokens, (N,), of each of B texts, float32.

        Only the last call may bring more of some texts than of others.
        """
        segment, context = self._model.segment, self._model.context
        pad = self._model.text.dictionary.pad()
        new = pad_sequence(texts, batch_first=True, padding_value=pad)
        tokens = torch.cat([self._kept, new], dim=1).to(self._model.device)
        done, total = self._read_so_far, self._read_so_far + new.size(1)
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
            features = self._features(source, start)
            found = score_features(self._model.model, features, target, scored)
            for part, row in zip(found.split(scored.sum(1).tolist()), losses, strict=True):
                row.append(part)
            done = end
        last = max(0, total - total % segment - context)
        self._kept, self._first = tokens[:, last - self._first :].cpu(), last
        self._read_so_far = total
        return [torch.cat(row) for row in losses]

    def _features(self, source: Tensor, start: int) -> Tensor:
        if not self._model.reads_streams:
            return self._model.model(source, features_only=True)[0]
        recurrence = None if self._model.context > 0 else self._recurrence
        decoder = self._model.model.decoder
        return decoder.extract_features(source, recurrence=recurrence, start=start)[0]


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers in the block and put them back after it; nothing for None."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        yield
