"""Continuing and scoring single texts: fairseq's search begins where prompts end.

Shapes: B prompts, P tokens of a prompt, T tokens, K beams, V symbols.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.data import (
    Dictionary,
    IdDataset,
    ListDataset,
    NestedDictionaryDataset,
    NumelDataset,
    PadDataset,
)
from fairseq.models import BaseFairseqModel
from fairseq.search import Sampling
from fairseq.sequence_generator import SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from fairseq_plugins.segment_language_model.prompt_readers import PromptedModels
from fairseq_plugins.segment_language_model.streams import StreamPasts


class RunningTextDictionary(Dictionary):
    """A dictionary that writes ``</s>``, which fairseq's leaves out."""

    def string(self, tensor: Any, *args: Any, **options: Any) -> str:
        """Return ``tensor`` as text, ``</s>`` included."""
        return super().string(tensor, *args, **{**options, "include_eos": True})


def prompts(
    dictionary: Dictionary, src_tokens: list[Tensor], src_lengths: list[int]
) -> NestedDictionaryDataset:
    """Turn texts, each ended by ``</s>``, into prompts: ``</s>`` moves to the front."""
    eos = torch.tensor([dictionary.eos()])
    source = ListDataset([torch.cat([eos, tokens[:-1]]) for tokens in src_tokens], src_lengths)
    return NestedDictionaryDataset(
        {
            "id": IdDataset(),
            "net_input": {
                "src_tokens": PadDataset(source, pad_idx=dictionary.pad(), left_pad=False),
                "src_lengths": NumelDataset(source),
            },
        },
        sizes=[np.array(src_lengths)],
    )


def prompt_targets(dictionary: Dictionary, src_tokens: Tensor, src_lengths: Tensor) -> Tensor:
    """Return the targets of prompts (B, T) with ``src_lengths`` (B,): ``</s>`` moves to the end."""
    target = torch.full_like(src_tokens, dictionary.pad())
    target[:, :-1] = src_tokens[:, 1:]
    return target.scatter(1, src_lengths.unsqueeze(1) - 1, dictionary.eos())


@torch.no_grad()
def score_prompts(
    scorer: SequenceScorer,
    models: Any,
    net_input: dict[str, Tensor],
    dictionary: Dictionary,
    segment: int,
    context: int,
) -> list[list[dict[str, Any]]]:
    """Return fairseq's scores of prompts (B, T), read as evaluation reads a text.

    That is in segments, with the past of those before, or again with ``context`` tokens before.
    """
    source, target = net_input["src_tokens"], prompt_targets(dictionary, **net_input)
    pasts, segments = StreamPasts(), []
    for start in range(0, target.size(1), segment):
        first, end = max(0, start - context), start + segment
        batch = {
            "target": target[:, first:end],
            "start_indices": [start - first] * len(target),
            "net_input": {"src_tokens": source[:, first:end], "pasts": pasts, "start": start},
        }
        segments.append(scorer.generate(models, batch))
    scores = []
    for parts in zip(*segments, strict=True):
        tokens, log_probs = (
            torch.cat([part[name] for (part,) in parts]) for name in ("tokens", "positional_scores")
        )
        ((first_part,), *_) = parts
        joined = {"tokens": tokens, "positional_scores": log_probs, "score": log_probs.mean()}
        scores.append([{**first_part, **joined}])
    return scores


def drop_empty_rows(sample: dict[str, Any]) -> list[int]:
    """Take streams that have no token in this segment out of a batch; return the others' rows.

    The batch changes in place, because fairseq-generate goes on to print its rows.
    """
    counts = sample.get("stream_tokens", [1] * len(sample["net_input"]["src_tokens"]))
    rows = [row for row, count in enumerate(counts) if count > 0]
    if len(rows) < len(counts):
        net_input = sample["net_input"]
        for tensors, names in ((sample, ("id", "target")), (net_input, net_input)):
            for name in names:
                if isinstance(tensors[name], Tensor):
                    tensors[name] = tensors[name][rows]
        for name in ("stream_tokens", "start_indices"):
            sample[name] = [sample[name][row] for row in rows]
        sample["nsentences"] = len(rows)
    return rows


def choose_prefixes(
    sample: dict[str, Any],
    prefix_tokens: Tensor | None,
    generator: PromptGenerator,
    dictionary: Dictionary,
) -> Tensor:
    """Return the tokens (B, P) with which each generation begins, padded on the right.

    They are prompts, segments, or the first tokens of segments (``--prefix-size``).
    """
    source = sample["net_input"]["src_tokens"]
    if prefix_tokens is None:
        prefix_tokens = sample["target"] if "target" in sample else source[:, 1:]
    longest = prefix_tokens.size(1)
    if longest >= (most := generator.longest(source.size(1))):
        limit = f"--max-len-b is {generator.most[1]}, and the model has positions for {most} tokens"
        if most < generator.max_len - 1:
            limit = f"--max-len-b is {generator.most[1]}, which you can raise"
        raise ValueError(
            f"{limit}: prompts of {longest} tokens, which count too, leave nothing to generate; "
            "cut them with --prefix-size"
        )
    if prefix_tokens.eq(dictionary.eos()).any() and not generator.running_text:
        raise ValueError(
            "a prompt holds </s>, which ends generation: give --continue-past-eos to generate "
            "running text"
        )
    return prefix_tokens


class PromptGenerator(SequenceGenerator):
    """fairseq's generator for texts that begin with prompts; it searches only what follows them.

    Args:
        segment: T of the segments in which models with recurrence read prompts.
        running_text: ``</s>`` is a symbol like others, and only the length ends a text.
        seed: seed of the draws; None continues torch's random numbers.
        no_repeat_ngram_size: texts, prompts included, repeat no sequence of this many symbols.
        options: fairseq's; the greatest lengths count prompts, ``min_len`` what follows them.
    """

    model: Any  # has read the prompts that are being continued

    def __init__(
        self,
        models: list[BaseFairseqModel],
        dictionary: Dictionary,
        segment: int,
        running_text: bool = False,
        seed: int | None = None,
        no_repeat_ngram_size: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(models, dictionary, **options)
        self.models = models
        self.segment = segment
        self.running_text = running_text
        self.no_repeat_ngram_size = no_repeat_ngram_size
        self.most, self.least = (self.max_len_a, self.max_len_b), self.min_len
        self.repeat_ngram_blocker: Any = None
        if running_text:
            # the end is a further symbol, which no text has
            self.eos = self.vocab_size
            self.vocab_size += 1
            self.symbols_to_strip_from_output = {self.pad}
        if seed is not None and isinstance(self.search, Sampling):
            self.search = SeededSampling(dictionary, self.search, seed)

    def longest(self, source_length: int) -> int:
        """Return the most tokens of a text whose source has ``source_length``."""
        factor, constant = self.most
        return min(int(factor * source_length + constant), self.max_len - 1)

    @torch.no_grad()
    def continue_prompts(
        self, prefixes: Tensor, source_lengths: Tensor
    ) -> list[list[dict[str, Tensor]]]:
        """Return the hypotheses for each prompt of ``prefixes`` (B, P), padded on the right.

        Prompts of one length, from sources of one length (B,), are continued together, so that each
        gets what it gets alone.
        """
        lengths = torch.stack([prefixes.ne(self.pad).sum(1), source_lengths], dim=1)
        hypotheses: list[list[dict[str, Tensor]]] = [[] for _ in prefixes]
        for length, source_length in lengths.unique(dim=0).tolist():
            rows = lengths.eq(lengths.new_tensor([length, source_length])).all(1).nonzero().view(-1)
            prompts, new = prefixes[rows, :length], self.longest(source_length) - length
            for row, row_hypotheses in zip(
                rows.tolist(), self._continue(prompts, new), strict=True
            ):
                hypotheses[row] = row_hypotheses
        return hypotheses

    def _continue(self, prompts: Tensor, length: int) -> list[list[dict[str, Tensor]]]:
        """Return the hypotheses for prompts (B, P) that up to ``length`` symbols follow."""
        end = length if self.running_text else None
        tokens = F.pad(prompts, (1, 0), value=self.tgt_dict.eos())
        self.model = PromptedModels(self.models, tokens, self.segment, self.temperature, end)
        if self.no_repeat_ngram_size > 0:
            self.repeat_ngram_blocker = functools.partial(
                forbid_repetitions, self.model, self.no_repeat_ngram_size
            )
        # fairseq's default of 1 is for whole texts
        least = self.least if self.least > 1 or prompts.size(1) == 0 else 0
        self.max_len_a, self.max_len_b, self.min_len = 0, length, min(least, length)
        sources = {"net_input": {"src_tokens": tokens}}
        rows = self._generate(sources, bos_token=self.tgt_dict.eos())
        hypotheses = []
        for prompt, scores, row in zip(prompts, self.model.prompt_scores, rows, strict=True):
            whole = (self._join(prompt, scores, hypothesis) for hypothesis in row)
            hypotheses.append(sorted(whole, key=lambda one: -float(one["score"])))
        # pasts take much memory
        self.model, self.repeat_ngram_blocker = None, None
        return hypotheses

    def _join(
        self, prompt: Tensor, prompt_scores: Tensor, hypothesis: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return a hypothesis with its prompt (P,), whose log-probabilities (P,) count too."""
        tokens = torch.cat([prompt, hypothesis["tokens"]])
        scores = torch.cat([prompt_scores, hypothesis["positional_scores"]])
        counted = len(scores)
        if self.running_text:
            # the end is no symbol
            tokens[-1], scores[-1] = self.pad, 0.0
            counted -= 1
        score = scores.sum()
        if self.normalize_scores:
            score = score / counted**self.len_penalty
        return {**hypothesis, "tokens": tokens, "positional_scores": scores, "score": score}


class SeededSampling(Sampling):
    """fairseq's ``sampling`` with one beam, whose draws depend on ``seed`` alone."""

    def __init__(self, dictionary: Dictionary, sampling: Sampling, seed: int) -> None:
        super().__init__(dictionary, sampling.sampling_topk, sampling.sampling_topp)
        self.seed = seed
        self.generator: torch.Generator | None = None

    def step(
        self, step: int, lprobs: Tensor, scores: Tensor | None, *unused: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw from log-probabilities (B, 1, V); return scores, symbols and beams, each (B, 1)."""
        if step == 0:
            self.generator = torch.Generator(lprobs.device).manual_seed(self.seed)
        symbols = None
        if self.sampling_topp > 0:
            probs, symbols = self._sample_topp(lprobs)
        elif self.sampling_topk > 0:
            log_probs, symbols = lprobs.topk(self.sampling_topk)
            probs = log_probs.exp()
        else:
            probs = lprobs.exp()
        drawn = probs.squeeze(1).multinomial(1, replacement=True, generator=self.generator)
        score = probs.squeeze(1).gather(1, drawn).log()
        if symbols is not None:
            drawn = symbols.squeeze(1).gather(1, drawn)
        if step > 0 and scores is not None:
            score = score + scores[:, :, step - 1]
        return score, drawn, torch.zeros_like(drawn)


def forbid_repetitions(
    models: PromptedModels,
    size: int,
    tokens: Tensor,
    log_probs: Tensor,
    bsz: int,
    beams: int,
    step: int,
) -> Tensor:
    """Return log-probabilities (R, V) without symbols that would repeat ``size`` symbols of a text.

    fairseq's own reads the unused end of ``tokens`` on a CPU, and so forbids nothing.
    """
    for row, text in enumerate(models.tokens.tolist()):
        last = text[len(text) - size + 1 :]
        forbidden = {
            text[i + size - 1]
            for i in range(len(text) - size + 1)
            if text[i : i + size - 1] == last
        }
        others = log_probs[row].index_fill(0, tokens.new_tensor([*forbidden]), -torch.inf)
        # the end allows one symbol, and a text may have used up all of them
        if not others.isneginf().all():
            log_probs[row] = others
    return log_probs
