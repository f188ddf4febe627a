"""Compare both variants of the Weighted Transformer with fairseq's transformer of the same size.

The authors published no code.
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator

from benchmarks.measure import TRAINING, Case, Model, Setting, Work
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from fairseq_plugins.weighted_transformer.optimizer import AdamWithBranchWeights

SUBLAYERS, AS_WRITTEN, PLAIN = "sublayers", "as-written", "transformer"
SYMBOLS, LENGTH, BEAM = 8000, 32, 4
# layers of encoder and decoder, d, inner width, heads or branches
SIZES = {"small": (3, 256, 1024, 4), "base": (6, 512, 2048, 8)}


def translation_case(size: str, mode: str, sentences: int, title: str) -> Case:
    """Return a case of training on, or beam search over, random sentences of one length."""
    dictionary = Dictionary()
    for number in range(SYMBOLS - dictionary.nspecial):
        dictionary.add_symbol(str(number))

    def build(name: str, setting: Setting) -> Work:
        source, target = torch.randint(4, SYMBOLS, (2, sentences, LENGTH)).to(setting.device)
        lengths = torch.full((sentences,), LENGTH, device=setting.device)
        sources = {"src_tokens": source, "src_lengths": lengths}
        model = setting.prepare(build_model(name, SIZES[size], dictionary))
        optimizer = AdamWithBranchWeights(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
        # translations are as long as the sources
        limits = {"max_len_a": 0, "max_len_b": LENGTH, "min_len": LENGTH}
        generator = SequenceGenerator([model], dictionary, beam_size=BEAM, **limits)

        def update() -> None:
            model.train()
            optimizer.zero_grad(set_to_none=True)
            with setting.precision():
                logits = model(**sources, prev_output_tokens=target)[0].flatten(0, 1)
                loss = F.cross_entropy(logits, target.flatten(), label_smoothing=0.1)
            loss.backward()
            optimizer.step()

        def translate() -> None:
            model.eval()
            with setting.precision(training=False):
                generator.generate([model], {"net_input": sources})

        return Work(
            update if mode == TRAINING else translate,
            lambda: model(**sources, prev_output_tokens=target)[0],
        )

    models = {name: Model(partial(build, name)) for name in (SUBLAYERS, AS_WRITTEN, PLAIN)}
    name = f"{size}, {sentences} sentences"
    return Case("weighted_transformer", name, mode, sentences * LENGTH, models, title)


def build_model(name: str, size: tuple[int, ...], dictionary: Dictionary) -> TransformerModel:
    """Return a variant of the Weighted Transformer, or fairseq's transformer."""
    names = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads")
    args = argparse.Namespace(
        **{f"encoder_{name}": number for name, number in zip(names, size, strict=True)},
        **{f"decoder_{name}": number for name, number in zip(names, size, strict=True)},
        dropout=0.1,
        attention_dropout=0.1,
        share_all_embeddings=True,
        max_source_positions=1024,
        max_target_positions=1024,
        tpu=False,
    )
    if name != PLAIN:
        args.branch_residual = name
    ARCH_CONFIG_REGISTRY[PLAIN if name == PLAIN else "weighted_transformer"](args)
    task = argparse.Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    kind = TransformerModel if name == PLAIN else WeightedTransformer
    return kind.build_model(args, task)
