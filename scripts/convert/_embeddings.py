"""Embeddings and outputs of other code as weights of a segment language model.

Both originals in PyTorch have the same adaptive softmax, with a projection in each band, also the
first, with biases, and with the clusters' logits last to first, which fairseq has first to last.
TensorFlow's Transformer-XL has them first to last too, always ties the embeddings, and need not
project the first band.

Shapes: V symbols, W those of a band, d model width, e width of a band.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_plugins.segment_language_model.decoder import IMPOSSIBLE_BIAS
from scripts.convert._foreign import ForeignTensors, ForeignVocabulary

_INPUT, _OUTPUT = "decoder.embed_tokens", "decoder.output_projection"
_SOFTMAX = "decoder.adaptive_softmax"
_TF_INPUT, _TF_OUTPUT = "transformer/adaptive_embed", "transformer/adaptive_softmax"


class Bands(NamedTuple):
    """How an adaptive input and softmax are made.

    Args:
        cutoffs: where the bands end, in the original's numbers, the last one left out.
        factor: how much narrower each band is.
        tied: whether input and output have the same embeddings.
        tied_projections: whether they have the same projections, for each band.
        reversed: whether the clusters' logits are last to first.
        first_projected: whether the first band has projections where the others have.
    """

    cutoffs: list[int]
    factor: int
    tied: bool
    tied_projections: list[bool]
    reversed: bool = True
    first_projected: bool = True

    @property
    def tails_tied(self) -> bool:
        """Whether input and output share the projections of all bands but the first."""
        # a model has all of them tied or none; those that were tied start equal then
        return self.tied and (self.factor == 1 or all(self.tied_projections[1:]))

    @property
    def head_tied(self) -> bool:
        """Whether they share that of the first band too."""
        return self.factor > 1 and self.tails_tied and self.tied_projections[0]


class Names(NamedTuple):
    """What the original calls its tensors; ``{}`` stands for the number of a band."""

    embedding: str
    input_projection: str
    output: str
    output_projection: str
    clusters: str
    cluster_bias: str


class Embeddings(NamedTuple):
    """Input and output of a model: of the whole vocabulary, or in bands.

    Args:
        vocabulary: its symbols.
        width: d.
        tied: whether input and output of the whole vocabulary have the same embeddings.
        names: what the original in PyTorch calls its tensors.
        bands: of an adaptive input and softmax; None for the whole vocabulary.
    """

    vocabulary: ForeignVocabulary
    width: int
    tied: bool
    names: Names | None
    bands: Bands | None

    @property
    def band_sizes(self) -> list[int]:
        """W of each band."""
        bounds = [0, *self.bands.cutoffs, len(self.vocabulary)]
        return [last - first for first, last in itertools.pairwise(bounds)]

    def options(self) -> dict[str, object]:
        """Options of the model."""
        if (bands := self.bands) is None:
            return {"share_decoder_input_output_embed": self.tied, "output_bias": True}
        cutoffs = ",".join(str(cutoff + self.vocabulary.added) for cutoff in bands.cutoffs)
        return {
            "adaptive_input": True,
            "adaptive_input_cutoff": cutoffs,
            "adaptive_input_factor": bands.factor,
            "adaptive_softmax_cutoff": cutoffs,
            "adaptive_softmax_factor": bands.factor,
            "tie_adaptive_weights": bands.tied,
            "tie_adaptive_proj": bands.tails_tied,
            "tie_adaptive_head_proj": bands.head_tied,
            "output_bias": True,
        }

    def translate(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        """Weights of the model."""
        return self._of_bands(tensors, self.bands) if self.bands else self._plain(tensors)

    def _plain(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        arrange, shape = self.vocabulary.arrange, (len(self.vocabulary), self.width)
        into, out_of = self.names.embedding.format(0), self.names.output.format(0)
        embedding, output = tensors.take_both(into, f"{out_of}.weight", self.tied, *shape)
        bias = tensors.take(f"{out_of}.bias", shape[0])
        return {
            f"{_INPUT}.weight": arrange(embedding),
            f"{_OUTPUT}.weight": arrange(output),
            f"{_OUTPUT}.bias": arrange(bias, IMPOSSIBLE_BIAS),
        }

    def _of_bands(self, tensors: ForeignTensors, bands: Bands) -> dict[str, Tensor]:
        arrange, clusters = self.vocabulary.arrange, len(bands.cutoffs)
        embeddings, outputs, biases, into, out_of = self._take_bands(tensors, bands)
        weights, bias = self._cluster_names()
        of_clusters = tensors.take(weights, clusters, self.width)
        cluster_bias = tensors.take(bias, clusters)
        if bands.reversed:
            of_clusters, cluster_bias = of_clusters.flip(0), cluster_bias.flip(0)

        found = {}
        embeddings[0], outputs[0] = map(arrange, (embeddings[0], outputs[0]))
        biases[0] = torch.cat([arrange(biases[0], IMPOSSIBLE_BIAS), cluster_bias])
        projected = bands.factor > 1 or not bands.tails_tied
        for band, embedding in enumerate(embeddings):
            found[f"{_INPUT}.embeddings.{band}.0.weight"] = embedding
            if projected:
                found[f"{_INPUT}.embeddings.{band}.1.weight"] = into[band]
        last = 1
        if not bands.tied:
            # (W + C, e) x (e, d): a projection before a matrix of its own is a part of it
            found[f"{_SOFTMAX}.head.0.weight"] = torch.cat([outputs[0], of_clusters]) @ out_of[0].T
        else:
            if bands.factor > 1:
                found[f"{_SOFTMAX}.head.0.weight"] = into[0] if bands.head_tied else out_of[0].T
                last = 2
            found[f"{_SOFTMAX}.head.{last - 1}.word_proj.weight"] = outputs[0]
            found[f"{_SOFTMAX}.head.{last - 1}.class_proj.weight"] = of_clusters
        found[f"{_SOFTMAX}.head.{last}.bias"] = biases[0]
        for tail in range(clusters):
            if projected:
                # (d, e), or a linear layer's (e, d)
                projection = out_of[tail + 1] if bands.tails_tied else out_of[tail + 1].T
                found[f"{_SOFTMAX}.tail.{tail}.0.weight"] = projection
            found[f"{_SOFTMAX}.tail.{tail}.2.weight"] = outputs[tail + 1]
            found[f"{_SOFTMAX}.tail.{tail}.3.bias"] = biases[tail + 1]
        return found

    def _cluster_names(self) -> tuple[str, str]:
        return self.names.clusters, self.names.cluster_bias

    def _take_bands(self, tensors: ForeignTensors, bands: Bands) -> tuple[list[Tensor], ...]:
        """Of each band: embeddings, outputs, both (W, e), biases (W,), projections (d, e) twice.

        Bands as wide as the model are one tensor in the original, and have no projections.
        """
        names, width, sizes = self.names, self.width, self.band_sizes
        taken = []
        for band, size in enumerate(sizes if bands.factor > 1 else [sum(sizes)]):
            narrow = width // bands.factor**band
            output = names.output.format(band)
            of_words = names.embedding.format(band), f"{output}.weight"
            both = tensors.take_both(*of_words, bands.tied, size, narrow)
            bias = tensors.take(f"{output}.bias", size)
            projections = ()
            if bands.factor > 1:
                of_bands = names.input_projection.format(band), names.output_projection.format(band)
                tied = bands.tied_projections[band]
                projections = tensors.take_both(*of_bands, tied, width, narrow)
            taken.append((*both, bias, *projections))
        parts = [list(part) for part in zip(*taken, strict=True)]
        if bands.factor == 1:
            identity = [torch.eye(width) for _ in sizes]
            parts = [*(list(whole.split(sizes)) for (whole,) in parts), identity, identity]
        return tuple(parts)


class TensorFlowEmbeddings(Embeddings):
    """Input and output of the TensorFlow code's Transformer-XL; projections there are (e, d)."""

    def _plain(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        arrange, shape = self.vocabulary.arrange, (len(self.vocabulary), self.width)
        embedding = arrange(tensors.take(f"{_TF_INPUT}/lookup_table", *shape))
        bias = tensors.take(f"{_TF_OUTPUT}/bias", shape[0])
        return {
            f"{_INPUT}.weight": embedding,
            f"{_OUTPUT}.weight": embedding,
            f"{_OUTPUT}.bias": arrange(bias, IMPOSSIBLE_BIAS),
        }

    def _cluster_names(self) -> tuple[str, str]:
        return f"{_TF_OUTPUT}/cutoff_0/cluster_W", f"{_TF_OUTPUT}/cutoff_0/cluster_b"

    def _take_bands(self, tensors: ForeignTensors, bands: Bands) -> tuple[list[Tensor], ...]:
        """Of each band the same as of the other originals."""
        width, sizes = self.width, self.band_sizes
        identity = torch.eye(width)
        biases = [
            tensors.take(f"{_TF_OUTPUT}/cutoff_{band}/b", size) for band, size in enumerate(sizes)
        ]
        if bands.factor == 1:
            whole = tensors.take(f"{_TF_INPUT}/lookup_table", sum(sizes), width)
            tables, identities = whole.split(sizes), [identity] * len(sizes)
            return list(tables), list(tables), biases, identities, identities
        tables, projections = [], []
        for band, size in enumerate(sizes):
            of_input, of_output = (f"{of}/cutoff_{band}" for of in (_TF_INPUT, _TF_OUTPUT))
            narrow = width // bands.factor**band
            tables.append(tensors.take(f"{of_input}/lookup_table", size, narrow))
            if band > 0 or bands.first_projected:
                names, tied = (f"{of_input}/proj_W", f"{of_output}/proj"), bands.tied_projections
                both = tensors.take_both(*names, tied[band], narrow, width)
                projections.append([projection.T for projection in both])
            else:
                projections.append([identity, identity])
        into, out_of = map(list, zip(*projections, strict=True))
        return tables, list(tables), biases, into, out_of
