"""A trained translation model from Python: sentences in one language to another."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.tasks.translation import TranslationTask
from fairseq.utils import apply_to_sample

from fairseq_plugins.python_interface.loaded_model import Hypothesis, LoadedModel, hypotheses
from fairseq_plugins.python_interface.text import TextCoder, Words


class TranslationModel(LoadedModel):
    """A model that translates sentences as fairseq-generate and fairseq-interactive do.

    Args:
        model: ready for inference.
        task: ``translation``.
        lines: makes symbols of a sentence and a sentence of symbols; None for sentences that are
            given as units between blanks.
    """

    _does = "this is a translation model, which translates sentence by sentence"

    def __init__(self, model: BaseFairseqModel, task: TranslationTask, lines: Any = None) -> None:
        super().__init__(model, task)
        lines = lines or Words()
        # a sentence may have names that nobody has seen: fairseq reads them as <unk>
        self.source = TextCoder(task.source_dictionary, lines, allow_unknown=True)
        self.target = TextCoder(task.target_dictionary, lines)

    def translate(self, text: str | Sequence[str], **options: Any) -> str | list[str]:
        """Translate a sentence, or each of several.

        Args:
            text: a sentence, or several; a newline within one counts as a blank.
            options: as of :meth:`hypotheses`.

        Raises:
            ValueError: as :meth:`hypotheses`.
        """
        if isinstance(text, str):
            return self.hypotheses([text], **options)[0][0].text
        return [found[0].text for found in self.hypotheses(text, **options)]

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
        """Return the translations of each sentence, the best first, as many as ``beam``.

        Args:
            sentences: in the source language.
            beam: width of the search.
            length_penalty: power of its length by which the score of a translation is divided.
            max_len_a: times the units of the longest source in a batch, plus ``max_len_b``: the
                most units of a translation.
            max_len_b: see ``max_len_a``.
            batch_size: how many are translated at once, of like length.

        Raises:
            ValueError: an option has an impossible value, or a sentence is empty or longer than the
                model has positions for.
        """
        if isinstance(sentences, str):
            raise ValueError(f"sentences is {sentences!r}: give a list of them")
        for name, value in (("beam", beam), ("max_len_b", max_len_b), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        sources = [self._encode(text, i) for i, text in enumerate(sentences, start=1)]
        options = SimpleNamespace(
            beam=beam, lenpen=length_penalty, max_len_a=max_len_a, max_len_b=max_len_b
        )
        generator = self.task.build_generator([self.model], options)
        lengths = [len(source) for source in sources]
        data = self.task.build_dataset_for_inference(sources, lengths)
        order = sorted(range(len(sources)), key=lambda number: lengths[number])
        found: dict[int, list[Hypothesis]] = {}
        for first in range(0, len(order), batch_size):
            batch = data.collater([data[number] for number in order[first : first + batch_size]])
            batch = apply_to_sample(lambda tensor: tensor.to(self.device), batch)
            results = self.task.inference_step(generator, [self.model], batch)
            numbers = batch["id"].tolist()
            found |= {
                number: hypotheses(self.target, result)
                for number, result in zip(numbers, results, strict=True)
            }
        return [found[number] for number in range(len(sources))]

    def _encode(self, sentence: str, number: int) -> torch.Tensor:
        """Return the tokens of a sentence and its ``</s>``."""
        name = f"sentence {number}"
        if isinstance(sentence, str):
            sentence = " ".join(sentence.split())
        tokens = self.source.encode(sentence, name)
        most = self.model.max_positions()[0]
        if len(tokens) >= most:
            raise ValueError(
                f"{name} has {len(tokens)} units, and the model positions for {most - 1}: cut it"
            )
        return torch.cat([tokens, tokens.new_tensor([self.source.dictionary.eos()])])
