"""Embeddings and outputs of other code as weights of a segment language model.

Both originals have the same adaptive softmax, with a projection in each band, also the first, with
biases, and with the clusters' logits last to first, which fairseq has first to last.

Shapes: V symbols, W those of a band, d model width, e width of a band.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_plugins.segment_language_model.decoder import IMPOSSIBLE_BIAS
from scripts.convert._foreign import ForeignConfig, ForeignTensors
from scripts.convert._vocabulary import EOS, UNK, ForeignVocabulary

_INPUT, _OUTPUT = "decoder.embed_tokens", "decoder.output_projection"
_SOFTMAX = "decoder.adaptive_softmax"


class Bands(NamedTuple):
    """How an adaptive input and softmax are made.

    Args:
        cutoffs: where the bands end, in the original's numbers, the last one left out.
        factor: how much narrower each band is.
        tied: whether input and output have the same embeddings.
        tied_projections: whether they have the same projections, for each band.
        reversed: whether the clusters' logits are last to first.
    """

    cutoffs: list[int]
    factor: int
    tied: bool
    tied_projections: list[bool]
    reversed: bool = True


class Names(NamedTuple):
    """What the original calls its tensors; ``{}`` stands for the number of a band."""

    embedding: str
    input_projection: str
    output: str
    output_projection: str
    clusters: str
    cluster_bias: str


def note_misfit(
    config: ForeignConfig, name: str, cutoffs: list[int], vocabulary: ForeignVocabulary
) -> None:
    """Note cutoffs, the entry ``name`` of a configuration, that do not go with the vocabulary."""
    if cutoffs[-1] >= len(vocabulary):
        config.note(f"{name} end at {cutoffs[-1]}, beyond the vocabulary", False)
    if not vocabulary.fits_first_band(cutoffs[0]):
        config.note(f"{EOS} and {UNK} must be among the first {cutoffs[0]} symbols", False)


def plain_options(tied: bool) -> dict[str, object]:
    """Options of the model for an embedding and an output of the whole vocabulary."""
    return {"share_decoder_input_output_embed": tied, "output_bias": True}


def translate_plain(
    tensors: ForeignTensors,
    vocabulary: ForeignVocabulary,
    width: int,
    tied: bool,
    embedding_name: str,
    output_name: str,
) -> dict[str, Tensor]:
    """Weights of an embedding and an output of the whole vocabulary."""
    shape = len(vocabulary), width
    if tied:
        embedding = output = tensors.take_tied(embedding_name, [f"{output_name}.weight"], *shape)
    else:
        embedding = tensors.take(embedding_name, *shape)
        output = tensors.take(f"{output_name}.weight", *shape)
    bias = tensors.take(f"{output_name}.bias", len(vocabulary))
    return {
        f"{_INPUT}.weight": vocabulary.arrange(embedding),
        f"{_OUTPUT}.weight": vocabulary.arrange(output),
        f"{_OUTPUT}.bias": vocabulary.arrange(bias, IMPOSSIBLE_BIAS),
    }


def adaptive_options(bands: Bands, vocabulary: ForeignVocabulary) -> dict[str, object]:
    """Options of the model for an adaptive input and softmax."""
    cutoffs = ",".join(str(cutoff + vocabulary.added) for cutoff in bands.cutoffs)
    return {
        "adaptive_input": True,
        "adaptive_input_cutoff": cutoffs,
        "adaptive_input_factor": bands.factor,
        "adaptive_softmax_cutoff": cutoffs,
        "adaptive_softmax_factor": bands.factor,
        "tie_adaptive_weights": bands.tied,
        "tie_adaptive_proj": _tails_tied(bands),
        "tie_adaptive_head_proj": _head_tied(bands),
        "output_bias": True,
    }


def _tails_tied(bands: Bands) -> bool:
    # a model has all of them tied or none; those that were tied start equal then
    return bands.tied and (bands.factor == 1 or all(bands.tied_projections[1:]))


def _head_tied(bands: Bands) -> bool:
    return bands.factor > 1 and _tails_tied(bands) and bands.tied_projections[0]


def translate_adaptive(
    tensors: ForeignTensors,
    vocabulary: ForeignVocabulary,
    width: int,
    bands: Bands,
    names: Names,
) -> dict[str, Tensor]:
    """Weights of an adaptive input and softmax."""
    bounds = [0, *bands.cutoffs, len(vocabulary)]
    embeddings, outputs, biases, into, out_of = _take_bands(tensors, width, bands, names, bounds)
    clusters = len(bands.cutoffs)
    of_clusters = tensors.take(names.clusters, clusters, width)
    cluster_bias = tensors.take(names.cluster_bias, clusters)
    if bands.reversed:
        of_clusters, cluster_bias = of_clusters.flip(0), cluster_bias.flip(0)

    found = {}
    embeddings[0], outputs[0] = map(vocabulary.arrange, (embeddings[0], outputs[0]))
    biases[0] = torch.cat([vocabulary.arrange(biases[0], IMPOSSIBLE_BIAS), cluster_bias])
    projected = bands.factor > 1 or not _tails_tied(bands)
    for band, embedding in enumerate(embeddings):
        found[f"{_INPUT}.embeddings.{band}.0.weight"] = embedding
        if projected:
            found[f"{_INPUT}.embeddings.{band}.1.weight"] = into[band]
    if not bands.tied:
        # (W + C, e) x (e, d): a projection before a matrix of its own is a part of it
        found[f"{_SOFTMAX}.head.0.weight"] = torch.cat([outputs[0], of_clusters]) @ out_of[0].T
        last = 1
    else:
        last = 1
        if bands.factor > 1:
            found[f"{_SOFTMAX}.head.0.weight"] = into[0] if _head_tied(bands) else out_of[0].T
            last = 2
        found[f"{_SOFTMAX}.head.{last - 1}.word_proj.weight"] = outputs[0]
        found[f"{_SOFTMAX}.head.{last - 1}.class_proj.weight"] = of_clusters
    found[f"{_SOFTMAX}.head.{last}.bias"] = biases[0]
    for tail in range(clusters):
        if projected:
            # (d, e), or a linear layer's (e, d)
            tied = _tails_tied(bands)
            projection = out_of[tail + 1] if tied else out_of[tail + 1].T
            found[f"{_SOFTMAX}.tail.{tail}.0.weight"] = projection
        found[f"{_SOFTMAX}.tail.{tail}.2.weight"] = outputs[tail + 1]
        found[f"{_SOFTMAX}.tail.{tail}.3.bias"] = biases[tail + 1]
    return found


def _take_bands(
    tensors: ForeignTensors, width: int, bands: Bands, names: Names, bounds: list[int]
) -> tuple[list[Tensor], ...]:
    """Of each band: embeddings (W, e), outputs (W, e), biases (W,), and projections (d, e) twice.

    Bands as wide as the model are one tensor in the original, and have no projections.
    """
    sizes = [last - first for first, last in itertools.pairwise(bounds)]
    if bands.factor == 1:
        names_of_band = names.embedding.format(0), names.output.format(0)
        embedding, output = _take_both(tensors, *names_of_band, bands.tied, bounds[-1], width)
        bias = tensors.take(f"{names.output.format(0)}.bias", bounds[-1])
        identity = [torch.eye(width) for _ in sizes]
        parts = (list(whole.split(sizes)) for whole in (embedding, output, bias))
        return (*parts, identity, identity)
    embeddings, outputs, biases, into, out_of = [], [], [], [], []
    for band, size in enumerate(sizes):
        narrow = width // bands.factor**band
        name = names.output.format(band)
        embedding, output = _take_both(
            tensors, names.embedding.format(band), name, bands.tied, size, narrow
        )
        embeddings.append(embedding)
        outputs.append(output)
        biases.append(tensors.take(f"{name}.bias", size))
        first, second = (
            of_all.format(band) for of_all in (names.input_projection, names.output_projection)
        )
        if bands.tied_projections[band]:
            into.append(tensors.take_tied(first, [second], width, narrow))
            out_of.append(into[-1])
        else:
            into.append(tensors.take(first, width, narrow))
            out_of.append(tensors.take(second, width, narrow))
    return embeddings, outputs, biases, into, out_of


def _take_both(
    tensors: ForeignTensors, embedding: str, output: str, tied: bool, *shape: int
) -> tuple[Tensor, Tensor]:
    """Embeddings and outputs of a band, which may be the same."""
    if tied:
        both = tensors.take_tied(embedding, [f"{output}.weight"], *shape)
        return both, both
    return tensors.take(embedding, *shape), tensors.take(f"{output}.weight", *shape)
