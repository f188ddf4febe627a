"""Convert embeddings and outputs of other code to weights of a segment language model.

All originals have the same adaptive softmax, with biases and a projection in each band; only
TensorFlow's Transformer-XL may omit the projection of the first band. The original PyTorch code
orders the cluster logits from last to first, fairseq from first to last.

Shapes: V symbols, W symbols of a band, C clusters, d model width, e band width.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from fairseq_plugins.segment_language_model.evaluation import IMPOSSIBLE_BIAS
from scripts.convert import ADAPTIVE_SPAN, TENSORFLOW, TRANSFORMER_XL
from scripts.convert._options import ForeignVocabulary
from scripts.convert._tensors import ForeignTensors

_INPUT, _OUTPUT = "decoder.embed_tokens", "decoder.output_projection"
_SOFTMAX = "decoder.adaptive_softmax"


class _Band(NamedTuple):
    """Embeddings and outputs (W, e), biases (W,), input and output projections (d, e)."""

    embedding: Tensor
    output: Tensor
    bias: Tensor
    proj_in: Tensor
    proj_out: Tensor


class Embeddings(NamedTuple):
    """Input and output of a model, adaptive if there are several bands.

    Args:
        source: the code that the model comes from.
        vocabulary: the model's symbols.
        width: d.
        tied: whether input and output have the same embeddings.
        cutoffs: ends of all bands but the last, in the original's symbol numbers.
        factor: ratio of the widths of a band and the next.
        tied_projections: for each band, whether input and output have the same projection.
        first_projected: whether the first band has projections if the others do.
    """

    source: str
    vocabulary: ForeignVocabulary
    width: int
    tied: bool
    cutoffs: list[int]
    factor: int
    tied_projections: list[bool]
    first_projected: bool = True

    @property
    def _tails_tied(self) -> bool:
        """Whether input and output share the projections of all bands but the first."""
        # our model ties all of them or none; if none, those that were tied start equal
        return self.tied and (self.factor == 1 or all(self.tied_projections[1:]))

    @property
    def _head_tied(self) -> bool:
        """Whether input and output share the projection of the first band too."""
        return self.factor > 1 and self._tails_tied and self.tied_projections[0]

    def options(self) -> dict[str, object]:
        """Return the options of our model."""
        if not self.cutoffs:
            return {"share_decoder_input_output_embed": self.tied, "output_bias": True}
        cutoffs = ",".join(str(cutoff + self.vocabulary.num_added) for cutoff in self.cutoffs)
        return {
            "adaptive_input": True,
            "adaptive_input_cutoff": cutoffs,
            "adaptive_input_factor": self.factor,
            "adaptive_softmax_cutoff": cutoffs,
            "adaptive_softmax_factor": self.factor,
            "tie_adaptive_weights": self.tied,
            "tie_adaptive_proj": self._tails_tied,
            "tie_adaptive_head_proj": self._head_tied,
            "output_bias": True,
        }

    def translate(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        """Return the weights of our model."""
        bands, arrange = self._take_bands(tensors), self.vocabulary.arrange
        embedding, output, bias, proj_in, proj_out = bands[0]
        embedding, output = arrange(embedding), arrange(output)
        bias = arrange(bias, IMPOSSIBLE_BIAS)
        if not self.cutoffs:
            words = {f"{_INPUT}.weight": embedding, f"{_OUTPUT}.weight": output}
            return {**words, f"{_OUTPUT}.bias": bias}
        clusters = tensors.take("crit.cluster_weight", len(self.cutoffs), self.width)
        cluster_bias = tensors.take("crit.cluster_bias", len(self.cutoffs))
        if self.source in (TRANSFORMER_XL, ADAPTIVE_SPAN):
            clusters, cluster_bias = clusters.flip(0), cluster_bias.flip(0)
        bands[0] = _Band(embedding, output, torch.cat([bias, cluster_bias]), proj_in, proj_out)

        weights = {}
        projected = self.factor > 1 or not self._tails_tied
        for number, band in enumerate(bands):
            weights[f"{_INPUT}.embeddings.{number}.0.weight"] = band.embedding
            if projected:
                weights[f"{_INPUT}.embeddings.{number}.1.weight"] = band.proj_in
        last = 1
        if not self.tied:
            # (W + C, e) x (e, d): without ties the head is one matrix, projection included
            weights[f"{_SOFTMAX}.head.0.weight"] = torch.cat([output, clusters]) @ proj_out.T
        else:
            if self.factor > 1:
                weights[f"{_SOFTMAX}.head.0.weight"] = proj_in if self._head_tied else proj_out.T
                last = 2
            weights[f"{_SOFTMAX}.head.{last - 1}.word_proj.weight"] = output
            weights[f"{_SOFTMAX}.head.{last - 1}.class_proj.weight"] = clusters
        weights[f"{_SOFTMAX}.head.{last}.bias"] = bands[0].bias
        for number, band in enumerate(bands[1:]):
            tail = f"{_SOFTMAX}.tail.{number}"
            if projected:
                # (d, e) if tied, else (e, d) as in a linear layer
                weights[f"{tail}.0.weight"] = band.proj_out if self._tails_tied else band.proj_out.T
            weights[f"{tail}.2.weight"] = band.output
            weights[f"{tail}.3.bias"] = band.bias
        return weights

    def _take_bands(self, tensors: ForeignTensors) -> list[_Band]:
        bounds = itertools.pairwise([0, *self.cutoffs, len(self.vocabulary)])
        sizes = [last - first for first, last in bounds]
        unprojected = [torch.eye(self.width)] * 2

        def take_tables(band: int, *shape: int) -> tuple[Tensor, Tensor]:
            names = f"word_emb.emb_layers.{band}.weight", f"crit.out_layers.{band}.weight"
            return tensors.take_both(*names, self.tied, *shape)

        if self.factor == 1:
            # all bands share one tensor, which is as wide as the model
            tables = take_tables(0, sum(sizes), self.width)
            biases = [f"crit.out_layers.{band}.bias" for band in range(len(sizes))]
            if self.source == TENSORFLOW:
                parts = [tensors.take(name, size) for name, size in zip(biases, sizes, strict=True)]
            else:
                parts = tensors.take(biases[0], sum(sizes)).split(sizes)
            rows = zip(*(table.split(sizes) for table in tables), parts, strict=True)
            return [_Band(*band, *unprojected) for band in rows]
        bands = []
        for band, size in enumerate(sizes):
            width = self.width // self.factor**band
            tables = take_tables(band, size, width)
            bias = tensors.take(f"crit.out_layers.{band}.bias", size)
            projections = unprojected
            if self.first_projected or band > 0:
                names = f"word_emb.emb_projs.{band}", f"crit.out_projs.{band}"
                tied = self.tied_projections[band]
                projections = tensors.take_both(*names, tied, self.width, width)
            bands.append(_Band(*tables, bias, *projections))
        return bands
