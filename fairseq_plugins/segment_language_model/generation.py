"""Continuing and scoring single texts: fairseq's search begins where prompts end.

Shapes: B prompts, P tokens of a prompt, T tokens, K beams, V symbols.
"""

from __future__ import annotations

import functools
import logging
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
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_plugins.fairseq_integration.options import flag
from fairseq_plugins.segment_language_model.evaluation import check_targets
from fairseq_plugins.segment_language_model.options import SegmentLanguageModelingConfig
from fairseq_plugins.segment_language_model.prompt_readers import PromptedModels

logger = logging.getLogger(__name__)
# a text with its scores, as fairseq's commands print it
Hypothesis = dict[str, Any]

# why options of fairseq-generate and fairseq-interactive are refused
REFUSED = {
    "match_source_len": "the source is the prompt, and says nothing about the length of what "
    "follows; give --min-len and --max-len-b",
    "constraints": "a language model has no constrained decoding",
    "print_alignment": "a language model has no source to align its text with",
    "replace_unk": "a language model has no source to copy words from",
    "retain_dropout": "fairseq retains only dropout of its own modules",
    "lm_path": "fairseq would let the other model read only what follows a prompt",
    "print_step": "decoding is not iterative",
}


class GenerationTask(FairseqTask):
    """What the task of segment models does with prompts, and with texts to score."""

    cfg: SegmentLanguageModelingConfig
    dictionary: Dictionary

    def build_dataset_for_inference(
        self, src_tokens: list[Tensor], src_lengths: list[int], **options: object
    ) -> NestedDictionaryDataset:
        """Return prompts, which begin with ``</s>`` instead of ending with it."""
        unknown = sum(int(tokens.eq(self.dictionary.unk()).sum()) for tokens in src_tokens)
        if unknown:
            logger.warning(
                "%d of %d symbols of the prompts are <unk>: write prompts in the symbols of "
                "dict.txt, or give the --bpe of the data (docs/evaluation.md)",
                unknown,
                sum(len(tokens) - 1 for tokens in src_tokens),  # without </s>
            )
        return prompts(self.dictionary, src_tokens, src_lengths)

    def build_generator(
        self, models: list[BaseFairseqModel], args: Any, **options: Any
    ) -> PromptGenerator | SequenceScorer:
        """Return a generator; with ``--continue-past-eos`` only length ends a text."""
        for name, reason in REFUSED.items():
            if getattr(args, name, None):
                raise ValueError(f"{flag(name)}: {reason}; leave it out")
        options["seq_gen_cls"] = PromptGenerator
        options["extra_gen_cls_kwargs"] = {
            **(options.get("extra_gen_cls_kwargs") or {}),
            "segment": self.cfg.tokens_per_sample,
            "running_text": self.cfg.continue_past_eos,
        }
        return super().build_generator(models, args, **options)

    def inference_step(
        self,
        generator: PromptGenerator | SequenceScorer,
        models: list[BaseFairseqModel],
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: None = None,
    ) -> list[list[Hypothesis]]:
        """Continue prompts; with ``--score-reference`` score sentences or segments instead.

        A split's segments are prompts, too, cut to ``--prefix-size`` tokens, (B, P). Rows without
        a token, at the end of shorter streams, are taken out of ``sample``.
        """
        if isinstance(generator, SequenceScorer):
            if "target" not in sample:
                return score_prompts(models, sample["net_input"], self)
            with torch.no_grad():
                hypotheses = generator.generate(models, sample)
            return [hypotheses[row] for row in drop_empty_rows(sample)]
        if self.cfg.extended_context > 0:
            raise ValueError(
                f"--extended-context is {self.cfg.extended_context}: nothing precedes a prompt; "
                "leave it out"
            )
        rows = drop_empty_rows(sample)
        prefix_tokens = None if prefix_tokens is None else prefix_tokens[rows]
        prefixes = choose_prefixes(sample, prefix_tokens, generator)
        return generator.continue_prompts(prefixes, sample["net_input"]["src_lengths"])


class RunningTextDictionary(Dictionary):
    """A dictionary that writes ``</s>``, which fairseq's leaves out."""

    def string(self, tensor: Tensor, *args: object, **options: object) -> str:
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


@torch.no_grad()
def score_prompts(
    models: list[BaseFairseqModel], net_input: dict[str, Tensor], task: GenerationTask
) -> list[list[Hypothesis]]:
    """Return the scores of prompts (B, T), as fairseq's scorer does, read as in evaluation."""
    lengths, pad = net_input["src_lengths"], task.dictionary.pad()
    # </s> stands before a prompt, and also ends it
    tokens = F.pad(net_input["src_tokens"], (0, 1), value=pad)
    tokens = tokens.scatter(1, lengths.unsqueeze(1), task.dictionary.eos())
    segment, context = task.cfg.tokens_per_sample, task.cfg.extended_context
    log_probs = PromptedModels(models, tokens, segment, context=context).prompt_scores
    targets = tokens[:, 1:]
    check_targets(log_probs.masked_fill(targets.eq(pad), 0.0), targets, task.dictionary)
    scores = []
    for row, row_scores, length in zip(targets, log_probs, lengths.tolist(), strict=True):
        part = {"tokens": row[:length], "positional_scores": row_scores[:length]}
        unused = {"attention": None, "alignment": None}
        scores.append([{**part, "score": row_scores[:length].mean(), **unused}])
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
    sample: dict[str, Any], prefix_tokens: Tensor | None, generator: PromptGenerator
) -> Tensor:
    """Return the tokens (B, P) with which each generation begins, padded on the right.

    They are prompts, segments, or the first tokens of segments (``--prefix-size``).
    """
    source = sample["net_input"]["src_tokens"]
    if prefix_tokens is None:
        prefix_tokens = sample["target"] if "target" in sample else source[:, 1:]
    length, max_length = prefix_tokens.size(1), generator.max_length(source.size(1))
    if length >= max_length:
        limit = f"--max-len-b is {generator.max_len_b}"
        if max_length < generator.max_positions - 1:
            limit += ", which you can raise"
        else:
            limit += f", and the model has positions for {max_length} tokens"
        raise ValueError(
            f"{limit}: prompts of {length} tokens, which count too, leave nothing to generate; "
            "cut them with --prefix-size"
        )
    if prefix_tokens.eq(generator.dictionary.eos()).any() and not generator.running_text:
        raise ValueError(
            "a prompt holds </s>, which ends generation: give --continue-past-eos to generate "
            "running text"
        )
    return prefix_tokens


class PromptGenerator:
    """Continues prompts by fairseq's search, which begins where they end.

    Args:
        segment: T of the segments in which models with recurrence read prompts.
        running_text: ``</s>`` is a symbol like others, and only the length ends a text.
        max_len_a: a text has at most ``max_len_a`` times the tokens of its source, plus
            ``max_len_b``, its prompt included.
        max_len_b: see ``max_len_a``.
        min_len: the least number of symbols that follow a prompt.
        no_repeat_ngram_size: texts, prompts included, repeat no sequence of this many symbols.
        options: those of fairseq's :class:`SequenceGenerator`.
    """

    def __init__(
        self,
        models: list[BaseFairseqModel],
        dictionary: Dictionary,
        segment: int,
        running_text: bool = False,
        max_len_a: float = 0,
        max_len_b: int = 200,
        min_len: int = 1,
        no_repeat_ngram_size: int = 0,
        **options: Any,
    ) -> None:
        for model in models:
            model.eval()
        self.models = models
        self.dictionary = dictionary
        self.segment = segment
        self.running_text = running_text
        self.max_len_a, self.max_len_b, self.min_len = max_len_a, max_len_b, min_len
        self.max_positions = EnsembleModel(models).max_decoder_positions()
        self.no_repeat_ngram_size = no_repeat_ngram_size
        self.options = {"temperature": 1.0, "normalize_scores": True, "len_penalty": 1.0, **options}
        # fairseq's commands do not print these
        end = dictionary.pad() if running_text else dictionary.eos()
        self.symbols_to_strip_from_output = {end}

    def max_length(self, source_length: int) -> int:
        """Return the most tokens of a text whose source has ``source_length``."""
        return min(int(self.max_len_a * source_length + self.max_len_b), self.max_positions - 1)

    @torch.no_grad()
    def continue_prompts(self, prefixes: Tensor, source_lengths: Tensor) -> list[list[Hypothesis]]:
        """Return the hypotheses for each prompt of ``prefixes`` (B, P), padded on the right.

        Prompts of one length, from sources of one length (B,), are continued together, so that each
        gets what it gets alone.
        """
        lengths = torch.stack([prefixes.ne(self.dictionary.pad()).sum(1), source_lengths], dim=1)
        hypotheses: list[list[Hypothesis]] = [[] for _ in prefixes]
        for length, source_length in lengths.unique(dim=0).tolist():
            rows = lengths.eq(lengths.new_tensor([length, source_length])).all(1).nonzero().view(-1)
            new = self.max_length(source_length) - length
            continued = self._continue(prefixes[rows, :length], new)
            for row, row_hypotheses in zip(rows.tolist(), continued, strict=True):
                hypotheses[row] = row_hypotheses
        return hypotheses

    def _continue(self, prompts: Tensor, length: int) -> list[list[Hypothesis]]:
        """Return the hypotheses for prompts (B, P) that up to ``length`` symbols follow."""
        tokens = F.pad(prompts, (1, 0), value=self.dictionary.eos())
        end = length if self.running_text else None
        models = PromptedModels(self.models, tokens, self.segment, self.options["temperature"], end)
        # fairseq's default of 1 is for whole texts
        min_len = self.min_len if self.min_len > 1 or prompts.size(1) == 0 else 0
        limits = {"max_len_b": length, "min_len": min(min_len, length)}
        search = SequenceGenerator(models, self.dictionary, **limits, **self.options)
        if self.running_text:
            # the end is a further symbol, which no text has
            search.eos = search.vocab_size
            search.vocab_size += 1
        if self.no_repeat_ngram_size > 0:
            search.repeat_ngram_blocker = functools.partial(
                forbid_repetitions, models, self.no_repeat_ngram_size
            )
        rows = search.generate(
            self.models, {"net_input": {"src_tokens": tokens}}, bos_token=self.dictionary.eos()
        )
        return [
            sorted(
                (self._join(prompt, scores, hypothesis) for hypothesis in row),
                key=lambda hypothesis: -float(hypothesis["score"]),
            )
            for prompt, scores, row in zip(prompts, models.prompt_scores, rows, strict=True)
        ]

    def _join(self, prompt: Tensor, prompt_scores: Tensor, hypothesis: Hypothesis) -> Hypothesis:
        """Return a hypothesis with its prompt (P,), whose log-probabilities (P,) count too."""
        tokens = torch.cat([prompt, hypothesis["tokens"]])
        scores = torch.cat([prompt_scores, hypothesis["positional_scores"]])
        counted = len(scores)
        if self.running_text:
            # the end is no symbol
            tokens[-1], scores[-1] = self.dictionary.pad(), 0.0
            counted -= 1
        score = scores.sum()
        if self.options["normalize_scores"]:
            score = score / counted ** self.options["len_penalty"]
        return {**hypothesis, "tokens": tokens, "positional_scores": scores, "score": score}


class SeededSampling(Sampling):
    """fairseq's ``sampling`` with one beam, whose draws depend on a seed alone, in threads too.

    fairseq's own draws with the random numbers that all of a process shares.
    """

    def __init__(
        self, dictionary: Dictionary, sampling: Sampling, seed: int, device: torch.device
    ) -> None:
        super().__init__(dictionary, sampling.sampling_topk, sampling.sampling_topp)
        self.generator = torch.Generator(device).manual_seed(int(seed))

    def step(
        self, step: int, lprobs: Tensor, scores: Tensor | None, *unused: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw from log-probabilities (B, 1, V); return scores, symbols and beams, each (B, 1)."""
        symbols = None
        if self.sampling_topp > 0:
            probs, symbols = self._sample_topp(lprobs)
        elif self.sampling_topk > 0:
            log_probs, symbols = lprobs.topk(self.sampling_topk)
            probs = log_probs.exp()
        else:
            probs = lprobs.exp()
        drawn = probs[:, 0].multinomial(1, replacement=True, generator=self.generator)
        score = probs[:, 0].gather(1, drawn).log()
        if symbols is not None:
            drawn = symbols[:, 0].gather(1, drawn)
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
