"""Trained translation models from Python: translate and score sentences.

Shapes: B sentences of a batch, T units.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fairseq.data import LanguagePairDataset
from fairseq.dataclass.configs import GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import BaseFairseqModel
from fairseq.tasks.translation import TranslationTask
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_plugins.python_interface.scoring import (
    Hypothesis,
    LoadedModel,
    Score,
    check_at_least,
    score_batches,
)
from fairseq_plugins.python_interface.text import TextCoder, Words
from fairseq_plugins.segment_language_model.evaluation import PERPLEXITY


class TranslationModel(LoadedModel):
    """A model that translates sentences as fairseq-generate and fairseq-interactive do.

    ``lines`` converts a sentence to units and back; None for whitespace-separated units. Units that
    the dictionaries lack are refused, or, with ``allow_unknown``, read as ``<unk>``.
    """

    def __init__(
        self,
        model: BaseFairseqModel,
        task: TranslationTask,
        lines: Any = None,
        allow_unknown: bool = False,
    ) -> None:
        super().__init__(model, task)
        lines = lines or Words()
        self.source = TextCoder(task.source_dictionary, lines, allow_unknown)
        self.target = TextCoder(task.target_dictionary, lines, allow_unknown)

    def translate(self, text: str | Sequence[str], **options: Any) -> str | list[str]:
        """Translate a sentence, or each of several; newlines count as blanks.

        For the options see :meth:`hypotheses`.
        """
        if isinstance(text, str):
            return self.hypotheses([text], **options)[0][0].text
        return [best.text for best, *_ in self.hypotheses(text, **options)]

    def hypotheses(
        self,
        sentences: Sequence[str],
        *,
        beam: int = 5,
        length_penalty: float = 1.0,
        max_len_a: float = 0.0,
        max_len_b: int = 200,
        batch_size: int = 32,
    ) -> list[list[Hypothesis]]:
        """Return the ``beam`` best translations of each sentence, best first.

        Args:
            sentences: an empty one has an empty translation.
            beam: width of the search.
            length_penalty: a translation's score is divided by its length to this power.
            max_len_a: translations have at most ``max_len_a`` times the units of the longest
                source in the batch, plus ``max_len_b``.
            max_len_b: see ``max_len_a``.
            batch_size: number of sentences to translate at once.
        """
        if isinstance(sentences, str):
            raise ValueError(f"sentences is {sentences!r}: give a list of them")
        check_at_least(1, beam=beam, max_len_b=max_len_b, batch_size=batch_size)
        named = enumerate(sentences, start=1)
        sources = [self._encode(self.source, text, f"sentence {i}") for i, text in named]
        config = SimpleNamespace(
            generation=OmegaConf.structured(GenerationConfig),
            dataset=SimpleNamespace(max_tokens=None, batch_size=batch_size),
            common_eval=SimpleNamespace(model_overrides="{}"),
            tokenizer=None,
            bpe=None,
        )
        hub = GeneratorHubInterface(config, self.task, [self.model]).to(self.device)
        # an empty sentence has only its </s>
        hypotheses = hub.generate(
            [source for source in sources if len(source) > 1],
            beam,
            lenpen=length_penalty,
            max_len_a=max_len_a,
            max_len_b=max_len_b,
        )
        translations = (self._hypotheses(self.target, each) for each in hypotheses)
        nothing = Hypothesis("", 0.0, [], np.empty(0, dtype=np.float32))
        return [next(translations) if len(source) > 1 else [nothing] for source in sources]

    def score(
        self, source: str | Sequence[str], target: str | Sequence[str], batch_size: int = 32
    ) -> Score | list[Score]:
        """Score the translation of a sentence, or of each of several, including its end."""
        if isinstance(source, str) and isinstance(target, str):
            return self._score_pairs([source], [target], 1)[0]
        if isinstance(source, str) or isinstance(target, str) or len(source) != len(target):
            raise ValueError("source and target: give two texts, or two lists of equal length")
        check_at_least(1, batch_size=batch_size)
        return self._score_pairs(source, target, batch_size)

    def _score_pairs(
        self, source: Sequence[str], target: Sequence[str], batch_size: int
    ) -> list[Score]:
        sides = (self.source, source, "sentence"), (self.target, target, "translation")
        sources, targets = (
            [self._encode(text, one, f"{name} {i}") for i, one in enumerate(texts, start=1)]
            for text, texts, name in sides
        )
        pairs = LanguagePairDataset(
            *(sources, list(map(len, sources)), self.source.dictionary),
            *(targets, list(map(len, targets)), self.target.dictionary),
            shuffle=False,
        )
        order = pairs.ordered_indices().tolist()
        batches = (
            pairs.collater([pairs[number] for number in order[first : first + batch_size]])
            for first in range(0, len(order), batch_size)
        )
        scores: dict[int, Score] = {}
        for rows, counts, losses in score_batches(
            self.model, batches, lambda batch: self._scored(batch["target"])
        ):
            for number, part in zip(rows, np.split(losses, np.cumsum(counts)[:-1]), strict=True):
                scores[number] = Score(self.target.symbols(targets[number]), -part, PERPLEXITY)
        return [scores[number] for number in range(len(sources))]

    def _encode(self, text: TextCoder, sentence: str, name: str) -> Tensor:
        """Return the tokens of a sentence, ``</s>`` included."""
        if isinstance(sentence, str):
            sentence = " ".join(sentence.split())
        tokens = text.encode(sentence, name, empty=True)
        most = self.model.max_positions()[text is self.target]
        if len(tokens) >= most:
            raise ValueError(
                f"{name} has {len(tokens)} units, and the model has positions for {most - 1}: "
                "shorten it"
            )
        return torch.cat([tokens, tokens.new_tensor([text.dictionary.eos()])])

    def _read_split(
        self, split: str, batch_size: int = 8
    ) -> tuple[np.ndarray, Iterable[dict[str, Any]], Callable[[int], int]]:
        source, target = self.task.cfg.source_lang, self.task.cfg.target_lang
        # file names may have the languages in either order
        pairs = (f"{split}.{source}-{target}.{target}", f"{split}.{target}-{source}.{target}")
        present = (name for name in pairs if Path(self.task.cfg.data, f"{name}.bin").is_file())
        tokens = self._tokens(next(present, pairs[0]))
        self.task.load_dataset(split)
        batches = self.task.get_batch_iterator(
            self.task.dataset(split),
            max_sentences=batch_size,
            max_positions=self.model.max_positions(),
            # score_split notices what is left out, and has a better message
            ignore_invalid_inputs=True,
            required_batch_size_multiple=1,
        ).next_epoch_itr(shuffle=False)
        return tokens, batches, int
