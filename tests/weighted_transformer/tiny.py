"""A Weighted Transformer and sentences that fit a test, and what results are compared with."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.transformer import TransformerModel

import fairseq_plugins  # noqa: F401 (registers the models)
from fairseq_plugins.weighted_transformer.as_written_attention import BranchedAttention
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from tests.reference.weighted_transformer import branched_attention, weighted_attention
from tests.tiny import tiny_task

PAD = 1
READINGS = ["sublayers", "as-written"]
# the paper's words, with the sum of its equations
AS_WRITTEN = {"branch_residual": "as-written", "branch_sum": "one"}


def tiny_arguments(**options) -> argparse.Namespace:
    """Parsed options of these models, as far as they are given: those of the decoder are not."""
    return argparse.Namespace(
        **{
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_embed_dim": 16,
            "encoder_ffn_embed_dim": 24,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "share_all_embeddings": True,
            "max_source_positions": 64,
            "max_target_positions": 64,
            "tpu": False,
            **options,
        }
    )


def _build(model, arch, seed, options):
    args = tiny_arguments(**options)
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    return model.build_model(args, tiny_task())


def tiny_weighted_transformer(seed: int = 1, **options) -> WeightedTransformer:
    """Encoder and decoder of 2 layers, d 16, f 24, 4 branches, without dropout."""
    return _build(WeightedTransformer, "weighted_transformer", seed, options)


def tiny_as_written(**options) -> WeightedTransformer:
    """The same in the reading as-written, κ and α from anywhere on the simplex."""
    return tiny_weighted_transformer(**{**AS_WRITTEN, "branch_start": "random", **options})


def tiny_plain_transformer(seed: int = 1, **options) -> TransformerModel:
    """fairseq's own of the same size."""
    return _build(TransformerModel, "transformer", seed, options)


def sentences() -> dict[str, torch.Tensor]:
    """Two pairs of sentences, with padding where fairseq puts it: before sources, after targets."""
    torch.manual_seed(5)
    source = torch.randint(4, 12, (2, 6))
    source[1, :2] = PAD
    target = torch.randint(4, 12, (2, 5))
    target[0, 3:] = PAD
    return {
        "src_tokens": source,
        "src_lengths": torch.tensor([6, 4]),
        "prev_output_tokens": target,
    }


def by_equations(module, query, key, visible):
    """The reference's attention of all sentences, (T, B, d).

    Args:
        module: a BranchedAttention or a WeightedAttention, whose weights are used.
        query: (T, B, d).
        key: (S, B, d), of keys and values.
        visible: (B, T, S), whether a query sees a key.
    """
    branched = isinstance(module, BranchedAttention)
    of_sentence = branched_attention if branched else weighted_attention
    sentences = [
        of_sentence(module, query[:, b], key[:, b], visible[b]) for b in range(query.size(1))
    ]
    return torch.stack(sentences, dim=1)


def assert_on_simplex(*vectors):
    """Each is of no negative numbers whose sum is 1, in single precision."""
    for x in vectors:
        assert x.dtype == torch.float32
        assert x.min() >= 0
        assert x.double().sum().item() == pytest.approx(1, abs=1e-6)
