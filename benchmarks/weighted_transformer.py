"""Both readings of the Weighted Transformer beside fairseq's transformer of the same size.

The authors published no code.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from benchmarks.measure import TRAINING, Case, Entry, Work
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from fairseq_plugins.weighted_transformer.optimizer import AdamWithBranchWeights

SUBLAYERS, AS_WRITTEN, PLAIN = "sublayers", "as-written", "transformer"
SYMBOLS, LENGTH, BEAM = 8000, 32, 4
# layers of encoder and decoder, d, inner width, heads or branches
SIZES = {"small": (3, 256, 1024, 4), "base": (6, 512, 2048, 8)}


class TranslationCase(Case):
    """A size of the models, which train on, or translate, random sentences of one length.

    Args:
        size: one of :data:`SIZES`.
        mode: TRAINING, an update with fairseq's Adam, or EVALUATION, beam search.
        sentences: of a batch.
        title: what a plot calls the model.
    """

    paper = "weighted_transformer"
    models = (SUBLAYERS, AS_WRITTEN, PLAIN)
    same = ()

    def __init__(self, size: str, mode: str, sentences: int, title: str = "") -> None:
        super().__init__(f"{size}, {sentences} sentences", mode, sentences * LENGTH, title)
        self.size, self.sentences = SIZES[size], sentences
        self.dictionary = Dictionary()
        for number in range(SYMBOLS - self.dictionary.nspecial):
            self.dictionary.add_symbol(str(number))

    def build(
        self, entries: Sequence[Entry], device: torch.device, published: Mapping[str, Any]
    ) -> list[Work]:
        """Return what the entries do."""
        torch.manual_seed(1)
        source, target = torch.randint(4, SYMBOLS, (2, self.sentences, LENGTH), device=device)
        lengths = torch.full((self.sentences,), LENGTH, device=device)
        batch = {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": target}
        make = self._training if self.mode == TRAINING else self._translation
        return [
            make(entry, entry.prepare(self._build(entry.model), device), batch) for entry in entries
        ]

    def _build(self, model: str) -> TransformerModel:
        names = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
        args = argparse.Namespace(
            **{
                f"{side}_{name}": number
                for side in ("encoder", "decoder")
                for name, number in zip(names, self.size, strict=True)
            },
            dropout=0.1,
            attention_dropout=0.1,
            share_all_embeddings=True,
            max_source_positions=1024,
            max_target_positions=1024,
            tpu=False,
            branch_residual=SUBLAYERS if model == PLAIN else model,
        )
        plain = model == PLAIN
        ARCH_CONFIG_REGISTRY[PLAIN if plain else "weighted_transformer"](args)
        torch.manual_seed(1)
        task = argparse.Namespace(
            source_dictionary=self.dictionary, target_dictionary=self.dictionary
        )
        return (TransformerModel if plain else WeightedTransformer).build_model(args, task)

    def _training(self, entry: Entry, model: TransformerModel, batch: dict[str, Tensor]) -> Work:
        optimizer = AdamWithBranchWeights(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
        targets = batch["prev_output_tokens"].flatten()

        def update() -> None:
            model.train()
            optimizer.zero_grad(set_to_none=True)
            with entry.precision(targets.device):
                logits = model(**batch)[0].flatten(0, 1)
                loss = F.cross_entropy(logits, targets, label_smoothing=0.1)
            loss.backward()
            optimizer.step()

        return Work(update, lambda: model(**batch)[0])

    def _translation(self, entry: Entry, model: TransformerModel, batch: dict[str, Tensor]) -> Work:
        """Translate to as many tokens as the sources have."""
        lengths = {"max_len_a": 0, "max_len_b": LENGTH, "min_len": LENGTH}
        generator = SequenceGenerator([model], self.dictionary, beam_size=BEAM, **lengths)
        sources = {name: batch[name] for name in ("src_tokens", "src_lengths")}

        def translate() -> None:
            model.eval()
            with entry.precision(batch["src_tokens"].device, training=False):
                generator.generate([model], {"net_input": sources})

        return Work(translate, lambda: model(**batch)[0])
