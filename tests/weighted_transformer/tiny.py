"""A small Weighted Transformer, a plain one to compare it with, and sentences, for tests."""

import pytest
import torch
from fairseq.models.transformer import TransformerModel

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from tests import tiny

PAD = 1
VARIANTS = ["sublayers", "as-written"]
EACH_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


def tiny_weighted_transformer(seed: int = 1, **options) -> WeightedTransformer:
    """Build encoder and decoder of 2 layers, d 16, f 24, 4 branches, without dropout."""
    return tiny.translation_model(WeightedTransformer, "weighted_transformer", seed, **options)


def tiny_as_written(**options) -> WeightedTransformer:
    """Build the as-written model, with κ and α drawn uniformly from the simplex."""
    variant = {"branch_residual": "as-written", "branch_start": "random"}
    return tiny_weighted_transformer(**{**variant, **options})


def tiny_plain_transformer(seed: int = 1, **options) -> TransformerModel:
    """Build fairseq's transformer of the same size."""
    return tiny.translation_model(TransformerModel, "transformer", seed, **options)


def sentences() -> dict[str, torch.Tensor]:
    """Return two sentence pairs, padded as fairseq does: before sources, after targets."""
    torch.manual_seed(5)
    source = torch.randint(4, 12, (2, 6))
    source[1, :2] = PAD
    target = torch.randint(4, 12, (2, 5))
    target[0, 3:] = PAD
    return {"src_tokens": source, "src_lengths": torch.tensor([6, 4]), "prev_output_tokens": target}


def weights_in(module):
    return [m for m in module.modules() if isinstance(m, BranchWeights)]


def assert_on_simplex(*vectors):
    """Check that each vector is float32 and nonnegative, with sum 1."""
    for x in vectors:
        assert x.dtype == torch.float32
        assert x.min() >= 0
        assert x.double().sum().item() == pytest.approx(1, abs=1e-6)
