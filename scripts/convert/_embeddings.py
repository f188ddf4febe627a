"""Convert embeddings and outputs of other code to weights of a segment language model.

All originals have the same adaptive softmax, with biases and a projection in each band; only
TensorFlow's Transformer-XL may omit the projection of the first band. The original PyTorch code
orders the cluster logits from last to first, fairseq from first to last.

Shapes: V symbols, W symbols of a band, C clusters, d model width, e band width.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fairseq_plugins.segment_language_model.evaluation import IMPOSSIBLE_BIAS
from scripts.convert import ADAPTIVE_SPAN, TENSORFLOW, TRANSFORMER_XL
from scripts.convert._options import ForeignVocabulary
from scripts.convert._tensors import ForeignTensors

_INPUT, _OUTPUT = "decoder.embed_tokens", "decoder.output_projection"
_SOFTMAX = "decoder.adaptive_softmax"


class Bands(NamedTuple):
    """The bands of an adaptive softmax and its embeddings.

    Args:
        tied: whether input and output have the same embeddings.
        cutoffs: ends of all bands but the last, in the original's symbol numbers.
        factor: ratio of the widths of a band and the next.
        tied_projections: for each band, whether input and output have the same projection.
        first_projected: whether the first band has projections if the others do.
    """

    tied: bool
    cutoffs: list[int]
    factor: int
    tied_projections: list[bool]
    first_projected: bool = True


class _Band(NamedTuple):
    """Embeddings and outputs (W, e), biases (W,), input and output projections (d, e)."""

    embedding: Tensor
    output: Tensor
    bias: Tensor
    proj_in: Tensor
    proj_out: Tensor


def convert_embeddings(
    tensors: ForeignTensors, vocabulary: ForeignVocabulary, source: str, width: int, bands: Bands
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options and the weights of our model's input and output."""
    if bands.factor < 1:
        raise ValueError(
            f"--config: the ratio of the bands' widths (div_val) is {bands.factor}: it must be at "
            "least 1"
        )
    if len(bands.tied_projections) != len(bands.cutoffs) + 1:
        raise ValueError(
            f"--config: tie_projs has {len(bands.tied_projections)} values for "
            f"{len(bands.cutoffs) + 1} bands: give one for each band"
        )
    first, *others = _take_bands(tensors, len(vocabulary), source, width, bands)
    embedding, output = vocabulary.arrange(first.embedding), vocabulary.arrange(first.output)
    bias = vocabulary.arrange(first.bias, IMPOSSIBLE_BIAS)
    if not bands.cutoffs:
        options = {"share_decoder_input_output_embed": bands.tied, "output_bias": True}
        weights = {f"{_INPUT}.weight": embedding, f"{_OUTPUT}.weight": output}
        return options, {**weights, f"{_OUTPUT}.bias": bias}

    # our model ties the projections of all bands but the first, or none; if none, those that were
    # tied start equal
    tails_tied = bands.tied and (bands.factor == 1 or all(bands.tied_projections[1:]))
    head_tied = bands.factor > 1 and tails_tied and bands.tied_projections[0]
    cutoffs = ",".join(str(cutoff + vocabulary.num_added) for cutoff in bands.cutoffs)
    options = {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoffs,
        "adaptive_input_factor": bands.factor,
        "adaptive_softmax_cutoff": cutoffs,
        "adaptive_softmax_factor": bands.factor,
        "tie_adaptive_weights": bands.tied,
        "tie_adaptive_proj": tails_tied,
        "tie_adaptive_head_proj": head_tied,
        "output_bias": True,
    }
    clusters = tensors.take("crit.cluster_weight", len(others), width)
    cluster_bias = tensors.take("crit.cluster_bias", len(others))
    if source in (TRANSFORMER_XL, ADAPTIVE_SPAN):
        clusters, cluster_bias = clusters.flip(0), cluster_bias.flip(0)

    weights = {f"{_INPUT}.embeddings.0.0.weight": embedding}
    head, projected = f"{_SOFTMAX}.head", bands.factor > 1 or not tails_tied
    if projected:
        weights[f"{_INPUT}.embeddings.0.1.weight"] = first.proj_in
    last = 1
    if not bands.tied:
        # (W + C, e) x (e, d): without ties the head is one matrix, projection included
        weights[f"{head}.0.weight"] = torch.cat([output, clusters]) @ first.proj_out.T
    else:
        if bands.factor > 1:
            weights[f"{head}.0.weight"] = first.proj_in if head_tied else first.proj_out.T
            last = 2
        weights[f"{head}.{last - 1}.word_proj.weight"] = output
        weights[f"{head}.{last - 1}.class_proj.weight"] = clusters
    weights[f"{head}.{last}.bias"] = torch.cat([bias, cluster_bias])
    for number, band in enumerate(others):
        embeddings, tail = f"{_INPUT}.embeddings.{number + 1}", f"{_SOFTMAX}.tail.{number}"
        weights[f"{embeddings}.0.weight"] = band.embedding
        if projected:
            weights[f"{embeddings}.1.weight"] = band.proj_in
            # (d, e) if tied, else (e, d) as in a linear layer
            weights[f"{tail}.0.weight"] = band.proj_out if tails_tied else band.proj_out.T
        weights[f"{tail}.2.weight"] = band.output
        weights[f"{tail}.3.bias"] = band.bias
    return options, weights


def _take_bands(
    tensors: ForeignTensors, symbols: int, source: str, width: int, bands: Bands
) -> list[_Band]:
    bounds = itertools.pairwise([0, *bands.cutoffs, symbols])
    sizes = [last - first for first, last in bounds]
    unprojected = [torch.eye(width)] * 2
    tables = "word_emb.emb_layers.{}.weight", "crit.out_layers.{}.weight"
    projections = "word_emb.emb_projs.{}", "crit.out_projs.{}"

    def take(names: tuple[str, str], band: int, tied: bool, *shape: int) -> tuple[Tensor, Tensor]:
        return tensors.take_both(*(name.format(band) for name in names), tied, *shape)

    if bands.factor == 1 and source != TENSORFLOW:
        biases = tensors.take("crit.out_layers.0.bias", symbols).split(sizes)
    else:
        biases = [tensors.take(f"crit.out_layers.{i}.bias", size) for i, size in enumerate(sizes)]
    if bands.factor == 1:
        # all bands share one tensor, which is as wide as the model
        shared = take(tables, 0, bands.tied, symbols, width)
        rows = zip(*(table.split(sizes) for table in shared), biases, strict=True)
        return [_Band(*band, *unprojected) for band in rows]
    taken = []
    for number, (size, bias) in enumerate(zip(sizes, biases, strict=True)):
        narrow = width // bands.factor**number
        both, tied = take(tables, number, bands.tied, size, narrow), bands.tied_projections[number]
        projected = bands.first_projected or number > 0
        through = take(projections, number, tied, width, narrow) if projected else unprojected
        taken.append(_Band(*both, bias, *through))
    return taken
