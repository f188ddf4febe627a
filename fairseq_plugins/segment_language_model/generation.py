"""Continuing and scoring single texts: prompts, and changes to fairseq's generator.

Shapes: B prompts, T tokens, K beams, V symbols.
"""

from collections.abc import Callable
from functools import partial
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
from fairseq.ngram_repeat_block import NGramRepeatBlock
from torch import Tensor, nn

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


def choose_prefix(
    sample: dict[str, Any],
    prefix_tokens: Tensor | None,
    generator: Any,
    dictionary: Dictionary,
    continue_past_eos: bool,
) -> Tensor:
    """Return the tokens (B, P) with which each generation begins.

    They are prompts, segments, or the first tokens of segments (``--prefix-size``).
    """
    source = sample["net_input"]["src_tokens"]
    if prefix_tokens is None:
        prefix_tokens = sample["target"] if "target" in sample else source[:, 1:]
    longest = prefix_tokens.size(1)
    limit = int(generator.max_len_a * source.size(1) + generator.max_len_b)
    if longest >= limit:
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


def end_by_length(generator: Any) -> Any:
    """Let only length end fairseq's ``generator``, which waits for ``<pad>``.

    fairseq makes ``<pad>`` impossible; at the last step, where it must win, all other symbols too.
    """
    end = generator.eos

    def free_end(log_probs: Tensor, *_: Any) -> None:
        of_end = log_probs[..., end]
        of_end.masked_fill_(log_probs.isneginf().all(-1), 0.0)

    generator.search = _AdjustedSearch(generator.search, free_end)
    return generator


def allow_unlikely_prompts(generator: Any) -> Any:
    """Let fairseq's ``generator`` sample after unlikely prompts.

    fairseq also samples the prompt's symbols, whose probability a low temperature would make 0.
    """

    def keep_possible(log_probs: Tensor, *_: Any) -> None:
        low = _one_left(log_probs).unsqueeze(-1) & log_probs.isfinite() & (log_probs < _LEAST)
        log_probs.masked_fill_(low, _LEAST)

    generator.search = _AdjustedSearch(generator.search, keep_possible)
    return generator


def enforce_min_length(generator: Any) -> Any:
    """Let ``--min-len`` count only what follows each prompt; fairseq counts the prompt too.

    The caller sets ``generator.prompt_lengths`` (B,) before generating.
    """
    least, end = generator.min_len, generator.eos
    if least > 1:
        generator.min_len = 1

        def go_on(log_probs: Tensor, step: int, rows: Tensor) -> None:
            early = step - generator.prompt_lengths[rows] < least  # (B,)
            early = early.unsqueeze(1) & ~_one_left(log_probs)
            log_probs[..., end].masked_fill_(early, -torch.inf)

        generator.search = _AdjustedSearch(generator.search, go_on)
    return generator


def block_repeats(generator: Any) -> Any:
    """Let ``--no-repeat-ngram-size`` of fairseq's ``generator`` look at the text so far.

    fairseq's own method reads the unused end of the token buffer, and so blocks nothing.
    """
    block = generator.repeat_ngram_blocker
    if block is not None:
        block._no_repeat_ngram = partial(_block_repeats, block)
    return generator


def _block_repeats(
    block: NGramRepeatBlock, tokens: Tensor, log_probs: Tensor, bsz: int, beams: int, step: int
) -> Tensor:
    """Forbid symbols that would repeat an n-gram, except in prompts and at the end."""
    before = block.no_repeat_ngram_size - 1
    possible = log_probs.isneginf().sum(-1) < log_probs.size(-1) - 1
    for row in possible.nonzero().view(-1).tolist():
        text = tokens[row, : step + 1].tolist()
        last = text[len(text) - before :]
        starts = range(len(text) - before)
        banned = {text[i + before] for i in starts if text[i : i + before] == last}
        log_probs[row, list(banned)] = -torch.inf
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
        self.adjust(lprobs, step, rows)
        return self.search.step(step, lprobs, scores, tokens, rows)
