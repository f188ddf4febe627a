"""Adaptive span with feed-forward layers, and all-attention, of the original code as ours.

Shapes: H heads, d model width, d_h head width, L largest span, N persistent vectors.
"""

from typing import Any

from torch import Tensor

from scripts.convert._embeddings import (
    Bands,
    Names,
    adaptive_options,
    note_misfit,
    plain_options,
    translate_adaptive,
    translate_plain,
)
from scripts.convert._foreign import ForeignConfig, ForeignTensors
from scripts.convert._vocabulary import ForeignVocabulary

_NAMES = Names(
    embedding="in_emb.emb_layers.{}.weight",
    input_projection="in_emb.emb_projs.{}",
    output="out_emb.out_layers.{}",
    output_projection="out_emb.out_projs.{}",
    clusters="out_emb.cluster_proj.weight",
    cluster_bias="out_emb.cluster_proj.bias",
)
# what the original adds to the sum of masked attention weights
_EPSILON = 1e-8


class AdaptiveSpanImport:
    """Reads the options of a model of the adaptive-span code, then its tensors.

    Args:
        config: its options.
        vocabulary: its symbols.
    """

    arch = "all_attention_lm"

    def __init__(self, config: ForeignConfig, vocabulary: ForeignVocabulary) -> None:
        self._vocabulary = vocabulary
        self._layers = config.integer("nb_layers")
        self._heads = config.integer("nb_heads")
        self._width = config.integer("hidden_size")
        self._span = config.integer("attn_span")
        self._vectors = config.integer("pers_mem_size", least=0, default=0)
        self._inner = 0 if self._vectors else config.integer("inner_hidden_size")
        self._adaptive = config.flag("adapt_span_enabled", False)
        # no tensor tells it
        self._ramp = config.integer("adapt_span_ramp") if self._adaptive else None
        self._dropouts = config.rate("dropout"), config.rate("emb_dropout")
        self.tokens_per_sample = config.integer("block_size", default=512)
        if self._width is not None and self._heads is not None and self._width % self._heads:
            config.note(
                f"hidden_size is {self._width}: nb_heads, {self._heads}, must divide it", False
            )
        size = config.integer("vocab_size", default=len(vocabulary))
        if size is not None and size != len(vocabulary):
            config.note(f"it has {size} symbols, and the vocabulary has {len(vocabulary)}")
        self._bands = self._read_bands(config)

    def _read_bands(self, config: ForeignConfig) -> Bands | None:
        if not config.flag("adapt_io_enabled", False):
            return None
        cutoffs = config.numbers("adapt_io_cutoffs")
        factor = config.integer("adapt_io_divval", least=2, default=4)
        tied = config.flag("adapt_io_tied", False)
        if cutoffs == []:
            config.note("adapt_io_enabled is true and adapt_io_cutoffs are empty", False)
        if not cutoffs or factor is None or tied is None:
            return None
        note_misfit(config, "adapt_io_cutoffs", cutoffs, self._vocabulary)
        return Bands(cutoffs, factor, tied, [tied] * (len(cutoffs) + 1))

    def options(self) -> dict[str, Any]:
        """Options of the model."""
        dropout, embed_dropout = self._dropouts
        of_embeddings = (
            adaptive_options(self._bands, self._vocabulary)
            if self._bands
            else plain_options(tied=False)
        )
        of_spans = {}
        if self._adaptive:
            of_spans = {"adaptive_span": True, "span_ramp": self._ramp, "span_epsilon": _EPSILON}
        return {
            "decoder_layers": self._layers,
            "decoder_embed_dim": self._width,
            "decoder_attention_heads": self._heads,
            "decoder_ffn_embed_dim": self._inner,
            "persistent_vectors": self._vectors,
            "attention_span": self._span,
            **of_spans,
            "zero_memory": True,
            "attention_dropout": dropout,
            "activation_dropout": dropout if self._inner else 0.0,
            "embed_dropout": embed_dropout,
            "output_dropout": embed_dropout,
            **of_embeddings,
        }

    def translate(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        """Weights of the model."""
        d, head_dim = self._width, self._width // self._heads
        if self._bands:
            found = translate_adaptive(tensors, self._vocabulary, d, self._bands, _NAMES)
        else:
            found = translate_plain(tensors, self._vocabulary, d, False, "in_emb.weight", "out_emb")
        # (1, d_h, L), the farthest distance first -> (L, d_h), the nearest first
        positions = tensors.take("key_pe", 1, head_dim, self._span)
        found["decoder.positions.weight"] = positions[0].T.flip(0)
        for number in range(self._layers):
            of_layer = self._layer(tensors, f"layers.{number}.", head_dim)
            found.update(
                {f"decoder.layers.{number}.{name}": value for name, value in of_layer.items()}
            )
        return found

    def _layer(self, tensors: ForeignTensors, source: str, head_dim: int) -> dict[str, Tensor]:
        d, inner, heads, vectors = self._width, self._inner, self._heads, self._vectors
        found = {
            f"self_attn.{ours}_proj.weight": tensors.take(
                f"{source}attn.proj_{theirs}.weight", d, d
            )
            for ours, theirs in (("q", "query"), ("k", "key"), ("v", "val"), ("out", "out"))
        }
        norms = {"self_attn": "norm1"}
        attention = f"{source}attn.attn."
        if vectors:
            memory = f"{attention}persistent_memory."
            # (H, d_h, N) -> (H, N, d_h)
            keys = tensors.take(f"{memory}key", heads, head_dim, vectors).transpose(1, 2)
            found["self_attn.persistent.keys"] = keys
            found["self_attn.persistent.values"] = tensors.take(
                f"{memory}val", heads, vectors, head_dim
            )
        else:
            norms["final"] = "norm2"
            for fc, shape in (("fc1", (inner, d)), ("fc2", (d, inner))):
                for kind, of_kind in (("weight", shape), ("bias", shape[:1])):
                    value = tensors.take(f"{source}ff.{fc}.{kind}", *of_kind)
                    found[f"feed_forward.{fc}.{kind}"] = value
        for ours, theirs in norms.items():
            for kind in ("weight", "bias"):
                value = tensors.take(f"{source}{theirs}.{kind}", d)
                found[f"{ours}_layer_norm.{kind}"] = value
        if self._adaptive:
            mask = "adaptive_span._mask."
            # (H, 1, 1) -> (H,)
            # the persistent vectors' module holds the same spans once more
            memory = f"{attention}persistent_memory.{mask}"
            spans = tensors.take_tied(
                f"{attention}{mask}current_val", [f"{memory}current_val"], heads, 1, 1
            )
            found["self_attn.span.value"] = spans.flatten()
            tensors.skip(f"{attention}{mask}mask_template")
            tensors.skip(f"{memory}mask_template")
        return found
