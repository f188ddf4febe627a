"""Continuing and scoring single texts: prompts, and changes to fairseq's generator.

Shapes: B prompts, T tokens, K beams, V symbols.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fairseq.data import (
    Dictionary,
    IdDataset,
    ListDataset,
    NestedDictionaryDataset,
    NumelDataset,
    PadDataset,
)
from fairseq.search import Sampling
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.streams import StreamPasts

# a log-probability, in nats, whose probability is not 0 in single precision
_LEAST = -80.0


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
    generator: Any,
    dictionary: Dictionary,
    continue_past_eos: bool,
) -> Tensor:
    """Return the tokens (B, P) with which each generation begins, padded on the right.

    They are prompts, segments, or the first tokens of segments (``--prefix-size``).
    """
    source = sample["net_input"]["src_tokens"]
    if prefix_tokens is None:
        prefix_tokens = sample["target"] if "target" in sample else source[:, 1:]
    longest = prefix_tokens.size(1)
    if longest >= _longest(generator, source):
        raise ValueError(
            f"--max-len-b is {generator.max_len_b}: prompts of {longest} tokens, which count too, "
            "leave nothing to generate; raise it, or cut the prompts with --prefix-size"
        )
    if prefix_tokens.eq(dictionary.eos()).any() and not continue_past_eos:
        raise ValueError(
            "a prompt holds </s>, which ends generation: give --continue-past-eos to generate "
            "running text"
        )
    return prefix_tokens


def _longest(generator: Any, source: Tensor) -> int:
    """Return the most tokens that fairseq's ``generator`` makes for sources (B, T)."""
    return min(
        int(generator.max_len_a * source.size(1) + generator.max_len_b), generator.max_len - 1
    )


@torch.no_grad()
def continue_prompts(
    generator: Any, models: Any, net_input: dict[str, Any], prefixes: Tensor, dictionary: Dictionary
) -> list[list[dict[str, Tensor]]]:
    """Return fairseq's hypotheses for each prompt of ``prefixes`` (B, P), padded on the right.

    Prompts of one length, from sources of one length, are continued together, so that each gets
    what it gets alone.
    """
    lengths = torch.stack([prefixes.ne(dictionary.pad()).sum(1), net_input["src_lengths"]], dim=1)
    hypotheses: list[list[dict[str, Tensor]]] = [[] for _ in prefixes]
    for length, source_length in lengths.unique(dim=0).tolist():
        rows = lengths.eq(lengths.new_tensor([length, source_length])).all(1).nonzero().view(-1)
        source_lengths = net_input["src_lengths"][rows]
        source = net_input["src_tokens"][rows, :source_length]
        # --min-len counts what follows a prompt; fairseq counts the prompt, too
        least, most = generator.min_new_tokens, _longest(generator, source)
        generator.min_len = min(least + length, most) if least > 1 else least
        part = generator.generate(
            models,
            {"net_input": {"src_tokens": source, "src_lengths": source_lengths}},
            prefix_tokens=prefixes[rows, :length],
            bos_token=dictionary.eos(),
        )
        for row, row_hypotheses in zip(rows.tolist(), part, strict=True):
            hypotheses[row] = row_hypotheses
    return hypotheses


def adapt_generator(generator: Any, seed: int | None = None) -> Any:
    """Adapt fairseq's ``generator`` to prompts: their end, draws, repeats and least length.

    With a ``seed``, draws come from a random generator of their own.
    """
    generator.min_new_tokens = generator.min_len
    if isinstance(generator.search, Sampling):
        if seed is not None:
            generator.search = SeededSampling(generator.tgt_dict, generator.search, seed)
        _allow_unlikely_prompts(generator)
    if generator.eos == generator.pad:
        _end_by_length(generator)
    if generator.repeat_ngram_blocker is not None:
        size = generator.repeat_ngram_blocker.no_repeat_ngram_size
        generator.repeat_ngram_blocker = NgramBlocker(size)
    return generator


def _end_by_length(generator: Any) -> None:
    """Let only length end fairseq's ``generator``, which waits for ``<pad>``.

    fairseq makes ``<pad>`` impossible; at the last step, where it must win, all other symbols too.
    """
    end = generator.eos

    def free_end(log_probs: Tensor) -> None:
        end_log_probs = log_probs[..., end]
        end_log_probs.masked_fill_(log_probs.isneginf().all(-1), 0.0)

    generator.search = _AdjustedSearch(generator.search, free_end)


def _allow_unlikely_prompts(generator: Any) -> None:
    """Let fairseq's ``generator`` sample after unlikely prompts.

    fairseq also samples the prompt's symbols, whose probability a low temperature would make 0.
    """

    def keep_possible(log_probs: Tensor) -> None:
        low = _one_left(log_probs).unsqueeze(-1) & log_probs.isfinite() & (log_probs < _LEAST)
        log_probs.masked_fill_(low, _LEAST)

    generator.search = _AdjustedSearch(generator.search, keep_possible)


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


class NgramBlocker(nn.Module):
    """Forbids symbols that would repeat an n-gram, except in prompts and at the end.

    fairseq's own reads the unused end of the token buffer on a CPU, and so blocks nothing.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, tokens: Tensor, log_probs: Tensor, bsz: int, beams: int, step: int) -> Tensor:
        """Return log-probabilities (B·K, V); the first step + 1 ``tokens`` (B·K, T) are set."""
        for row, text in enumerate(tokens[:, : step + 1].tolist()):
            last = text[len(text) - self.size + 1 :]
            banned = {
                text[i + self.size - 1]
                for i in range(len(text) - self.size + 1)
                if text[i : i + self.size - 1] == last
            }
            others = log_probs[row].index_fill(0, tokens.new_tensor([*banned]), -torch.inf)
            # prompts and the end allow one symbol, and a text may have used up all of them
            if not others.isneginf().all():
                log_probs[row] = others
        return log_probs


def _one_left(log_probs: Tensor) -> Tensor:
    """Return which rows of log-probabilities (B, K, V) allow only one symbol, (B, K)."""
    return log_probs.isneginf().sum(-1) == log_probs.size(-1) - 1


class _AdjustedSearch(nn.Module):
    """A search of fairseq's that first lets ``adjust`` change the log-probabilities in place."""

    def __init__(self, search: nn.Module, adjust: Callable[..., None]) -> None:
        super().__init__()
        self.search = search
        self.adjust = adjust

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("search"), name)

    def step(
        self,
        step: int,
        lprobs: Tensor,
        scores: Tensor | None,
        tokens: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Any:
        """Choose the next symbols by log-probabilities (B, K, V), as fairseq's searches do."""
        self.adjust(lprobs)
        return self.search.step(step, lprobs, scores, tokens, rows)
