"""Embeddings and outputs of other code as weights of a segment language model.

All originals have the same adaptive softmax: biases, a projection in each band, also the first
(TensorFlow's Transformer-XL may leave that out), and, in PyTorch, the clusters' logits last to
first, which fairseq has first to last.

Shapes: V symbols, W those of a band, C clusters, d model width, e width of a band.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_plugins.segment_language_model.evaluation import IMPOSSIBLE_BIAS
from scripts.convert._options import ForeignVocabulary
from scripts.convert._tensors import ForeignTensors

_INPUT, _OUTPUT = "decoder.embed_tokens", "decoder.output_projection"
_SOFTMAX = "decoder.adaptive_softmax"
# of a band, by the names of Transformer-XL's PyTorch code
_EMBEDDING, _INTO = "word_emb.emb_layers.{}.weight", "word_emb.emb_projs.{}"
_OUTPUT_WEIGHT, _BIAS = "crit.out_layers.{}.weight", "crit.out_layers.{}.bias"
_OUT_OF = "crit.out_projs.{}"


class Bands(NamedTuple):
    """How an adaptive input and softmax are made.

    Args:
        cutoffs: where the bands end, in the original's numbers, the last one left out.
        factor: how much narrower each band is.
        tied: whether input and output have the same embeddings.
        tied_projections: whether they have the same projections, for each band.
        reversed: whether the clusters' logits are last to first.
        first_projected: whether the first band has projections where the others have.
        biases_apart: whether each band has a tensor of biases where all have one of embeddings.
    """

    cutoffs: list[int]
    factor: int
    tied: bool
    tied_projections: list[bool]
    reversed: bool = True
    first_projected: bool = True
    biases_apart: bool = False

    @property
    def tails_tied(self) -> bool:
        """Whether input and output share the projections of all bands but the first."""
        # a model has all of them tied or none; those that were tied start equal then
        return self.tied and (self.factor == 1 or all(self.tied_projections[1:]))

    @property
    def head_tied(self) -> bool:
        """Whether they share that of the first band too."""
        return self.factor > 1 and self.tails_tied and self.tied_projections[0]


class Embeddings(NamedTuple):
    """Input and output of a model: of the whole vocabulary, or in bands.

    Args:
        vocabulary: its symbols.
        width: d.
        tied: whether input and output of the whole vocabulary have the same embeddings.
        bands: of an adaptive input and softmax; None for the whole vocabulary.
    """

    vocabulary: ForeignVocabulary
    width: int
    tied: bool
    bands: Bands | None

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
        if self.bands:
            return self._translate_bands(tensors, self.bands)
        size, arrange = len(self.vocabulary), self.vocabulary.arrange
        words = _EMBEDDING.format(0), _OUTPUT_WEIGHT.format(0)
        embedding, output = tensors.take_both(*words, self.tied, size, self.width)
        bias = tensors.take(_BIAS.format(0), size)
        return {
            f"{_INPUT}.weight": arrange(embedding),
            f"{_OUTPUT}.weight": arrange(output),
            f"{_OUTPUT}.bias": arrange(bias, IMPOSSIBLE_BIAS),
        }

    def _translate_bands(self, tensors: ForeignTensors, bands: Bands) -> dict[str, Tensor]:
        arrange, clusters = self.vocabulary.arrange, len(bands.cutoffs)
        embeddings, outputs, biases, into, out_of = self._take_bands(tensors, bands)
        of_clusters = tensors.take("crit.cluster_weight", clusters, self.width)
        cluster_bias = tensors.take("crit.cluster_bias", clusters)
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

    def _take_bands(self, tensors: ForeignTensors, bands: Bands) -> list[list[Tensor]]:
        """Of each band: embeddings, outputs, both (W, e), biases (W,), projections (d, e) twice.

        Bands as wide as the model are one tensor in the original, and have no projections.
        """
        bounds = [0, *bands.cutoffs, len(self.vocabulary)]
        sizes = [last - first for first, last in itertools.pairwise(bounds)]
        widths = [self.width // bands.factor**band for band in range(len(sizes))]
        narrower = bands.factor > 1

        def take_words(band: int, *shape: int) -> tuple[Tensor, Tensor]:
            names = _EMBEDDING.format(band), _OUTPUT_WEIGHT.format(band)
            return tensors.take_both(*names, bands.tied, *shape)

        if narrower:
            words = [take_words(*shape) for shape in zip(itertools.count(), sizes, widths)]
        else:
            whole = take_words(0, len(self.vocabulary), self.width)
            words = zip(*(tensor.split(sizes) for tensor in whole), strict=True)
        if narrower or bands.biases_apart:
            biases = [tensors.take(_BIAS.format(band), size) for band, size in enumerate(sizes)]
        else:
            biases = list(tensors.take(_BIAS.format(0), len(self.vocabulary)).split(sizes))
        projections = [[torch.eye(self.width)] * 2 for _ in sizes]
        for band in range(0 if bands.first_projected else 1, len(sizes) if narrower else 0):
            names, tied = (_INTO.format(band), _OUT_OF.format(band)), bands.tied_projections[band]
            projections[band] = tensors.take_both(*names, tied, self.width, widths[band])
        embeddings, outputs = map(list, zip(*words, strict=True))
        return [embeddings, outputs, biases, *map(list, zip(*projections, strict=True))]
