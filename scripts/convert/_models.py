"""Models of other code as ours: their options, and their tensors by our names.

Shapes: H heads, d model width, d_h head width, L largest span, N persistent vectors.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from scripts.convert import ADAPTIVE_SPAN, HUGGING_FACE, TENSORFLOW, TRANSFORMER_XL
from scripts.convert._embeddings import Bands, Embeddings
from scripts.convert._options import EOS, UNK, ForeignConfig, ForeignVocabulary
from scripts.convert._tensors import ForeignTensors

# What a source calls the tensors of Transformer-XL's PyTorch code, one replacement after the other.
_RENAMING = {
    TRANSFORMER_XL: [],
    HUGGING_FACE: [(r"^(?!crit\.)", "transformer.")],
    ADAPTIVE_SPAN: [
        (r"^word_emb\.", "in_emb."),
        (r"^crit\.cluster_(\w+)", r"out_emb.cluster_proj.\1"),
        (r"^crit\.", "out_emb."),
    ],
    TENSORFLOW: [
        (r"^(word_emb\.emb|crit\.out)_layers\.(\d+)\.weight", r"\2/lookup_table"),
        (r"^(\d+/lookup_table)", r"adaptive_embed/cutoff_\1"),
        (r"^word_emb\.emb_projs\.(\d+)", r"adaptive_embed/cutoff_\1/proj_W"),
        (r"^crit\.out_layers\.(\d+)\.bias", r"adaptive_softmax/cutoff_\1/b"),
        (r"^crit\.out_projs\.(\d+)", r"adaptive_softmax/cutoff_\1/proj"),
        (r"^crit\.cluster_weight", "adaptive_softmax/cutoff_0/cluster_W"),
        (r"^crit\.cluster_bias", "adaptive_softmax/cutoff_0/cluster_b"),
        (r"^layers\.(\d+)\.", r"layer_\1/"),
        (r"dec_attn\.", "rel_attn/"),
        (r"pos_ff\.", "ff/"),
        (r"(\w+)_net\.weight", r"\1/kernel"),
        (r"CoreNet\.0\.", "layer_1/"),
        (r"CoreNet\.3\.", "layer_2/"),
        (r"layer_norm\.weight", "LayerNorm/gamma"),
        (r"layer_norm\.bias", "LayerNorm/beta"),
        (r"(layer_[12])/weight", r"\1/kernel"),
        (r"^", "transformer/"),
    ],
}
# without bands, or with bands as wide as the model
_ONE_TABLE = [(r"adaptive_embed/cutoff_0/", "adaptive_embed/")]
_ONE_BIAS = [(r"adaptive_softmax/cutoff_0/b$", "adaptive_softmax/bias")]
_ADAPTIVE_SPAN_WHOLE = [
    (r"^in_emb\.emb_layers\.0\.", "in_emb."),
    (r"^out_emb\.out_layers\.0\.", "out_emb."),
]
# matrices that TensorFlow has as (in, out)
_TENSORFLOW_MATRICES = r"/(kernel|proj|proj_W)$"
# vectors u and v
_BIASES = ("r_w_bias", "r_r_bias")
# what the original adaptive span adds to the sum of masked attention weights
_EPSILON = 1e-8


class ForeignModel:
    """A model of other code: the options of ours, and its tensors by our names.

    Args:
        config: its options, which are read here.
        vocabulary: its symbols.
        source: the code that it comes from, one of SOURCES.
    """

    arch: str
    tokens_per_sample: int
    _embeddings: Embeddings
    _layers: int
    _heads: int
    _width: int

    def __init__(self, config: ForeignConfig, vocabulary: ForeignVocabulary, source: str) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._source = source
        self._renaming = list(_RENAMING[source])

    def options(self) -> dict[str, Any]:
        """Options of the model."""
        raise NotImplementedError

    def translate(self, found: dict[str, Tensor], problems: list[str]) -> dict[str, Tensor]:
        """Weights of the model, from those of the checkpoint."""
        transposed = (_TENSORFLOW_MATRICES,) if self._source == TENSORFLOW else ()
        tensors = ForeignTensors(found, problems, self._renaming, *transposed)
        weights = self._embeddings.translate(tensors)
        for number, of_layer in enumerate(self._translate_layers(tensors)):
            weights |= {f"decoder.layers.{number}.{name}": x for name, x in of_layer.items()}
        weights |= self._translate_positions(tensors)
        tensors.note_surplus()
        return weights

    def _translate_layers(self, tensors: ForeignTensors) -> Iterator[dict[str, Tensor]]:
        """Weights of each layer."""
        raise NotImplementedError

    def _translate_positions(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        """Weights of positions that all layers share."""
        raise NotImplementedError

    def _check_size(self, size: int) -> None:
        if size != len(self._vocabulary):
            has = f"{size} symbols, and the vocabulary has {len(self._vocabulary)}"
            self._config.note(f"it has {has}")

    def _check_cutoffs(self, name: str, cutoffs: list[int]) -> None:
        if cutoffs[-1] >= len(self._vocabulary):
            beyond = f"{name} end at {cutoffs[-1]}, beyond the vocabulary"
            self._config.note(beyond, readable=False)
        if not self._vocabulary.fits_first_band(cutoffs[0]):
            late = f"{EOS} and {UNK} must be among the first {cutoffs[0]} symbols"
            self._config.note(late, readable=False)


class TransformerXL(ForeignModel):
    """Transformer-XL of the original code in PyTorch and TensorFlow, and of Hugging Face.

    All have the same layers. Hugging Face and TensorFlow have the clusters' logits first to last,
    and begin with a memory of zero vectors. TensorFlow has matrices (in, out), ties the embeddings,
    and has another epsilon in norms; with ``same_length`` a token sees one token more.
    """

    arch = "transformer_xl"

    def __init__(self, config: ForeignConfig, vocabulary: ForeignVocabulary, source: str) -> None:
        super().__init__(config, vocabulary, source)
        self._layers = config.integer("n_layer")
        self._heads = config.integer("n_head")
        self._width = config.integer("d_model")
        self._inner = config.integer("d_inner")
        self._untied_biases = config.flag("untie_r", False)
        self._dropouts = config.rate("dropout"), config.rate("dropatt")
        # no tensor shows these: the original's own defaults would do where its option is misspelt
        self._mem_len = config.integer("mem_len", least=0)
        self._same_length = config.flag("same_length")
        self._clamp_len = config.integer("clamp_len", least=-1)
        self.tokens_per_sample = config.integer("tgt_len", 128)
        if config.readable:
            config.expect("d_head", self._width // self._heads, "here d_head is d_model / n_head")
            config.expect("d_embed", self._width, "here d_embed is d_model")
        self._pre_norm, tied = False, True
        if source == TENSORFLOW:
            self._check_size(config.integer("n_token", len(vocabulary)))
            bands = self._read_tensorflow_bands()
            if bands is None or bands.factor == 1:
                self._renaming += _ONE_TABLE
            if bands is None:
                self._renaming += _ONE_BIAS
        else:
            hugging_face = source == HUGGING_FACE
            # no tensor shows it either
            self._pre_norm = config.flag("pre_lnorm", False if hugging_face else None)
            # older versions of transformers have the original's names
            size = config.name_of("vocab_size", "n_token") if hugging_face else "n_token"
            self._check_size(config.integer(size))
            name = config.name_of("tie_weight", "tie_word_embeddings")
            tied = config.flag(name if hugging_face else "tie_weight", True)
            config.expect("attn_type", 0, "only 0, Transformer-XL's own attention, is known")
            config.expect("ext_len", 0, "import it with 0, and evaluate with --extended-context")
            config.expect("layer_norm_epsilon", 1e-5, "only 1e-05 is known")
            bands = self._read_bands(tied)
        self._embeddings = Embeddings(vocabulary, self._width, tied, bands)

    def options(self) -> dict[str, Any]:
        """Options of the model."""
        dropout, attention_dropout = self._dropouts
        tensorflow = {"layer_norm_epsilon": 1e-12, "same_length_besides_itself": True}
        return {
            "decoder_layers": self._layers,
            "decoder_embed_dim": self._width,
            "decoder_attention_heads": self._heads,
            "decoder_ffn_embed_dim": self._inner,
            "decoder_normalize_before": self._pre_norm,
            "no_decoder_final_norm": self._pre_norm,
            "untie_r": self._untied_biases,
            "mem_len": self._mem_len,
            "same_length": self._same_length,
            "zero_memory": self._source != TRANSFORMER_XL,
            "clamp_len": self._clamp_len if self._clamp_len > 0 else None,
            "dropout": dropout,
            "embed_dropout": dropout,
            "output_dropout": dropout,
            "activation_dropout": dropout,
            "attention_dropout": attention_dropout,
            **self._embeddings.options(),
            **(tensorflow if self._source == TENSORFLOW else {}),
        }

    def _read_bands(self, tied: bool) -> Bands | None:
        cutoffs = self._config.numbers("cutoffs")
        if not cutoffs:
            return None
        self._check_cutoffs("cutoffs", cutoffs)
        factor = self._config.integer("div_val", 1)
        # bands as wide as the model have no projections
        tied_projections = [True] * (len(cutoffs) + 1)
        if factor != 1:
            tied_projections = self._config.flags("tie_projs", len(cutoffs) + 1)
        return Bands(cutoffs, factor, tied, tied_projections, self._source == TRANSFORMER_XL)

    def _read_tensorflow_bands(self) -> Bands | None:
        cutoffs = self._config.numbers("cutoffs")
        if not cutoffs:
            one = "without cutoffs there is one band, as wide as the model"
            self._config.expect("div_val", 1, one)
            return None
        self._check_cutoffs("cutoffs", cutoffs)
        factor = self._config.integer("div_val", 1)
        tied = self._config.flag("proj_share_all_but_first", False)
        first_projected = self._config.flag("proj_same_dim", True)
        tied_projections = [False, *([tied] * len(cutoffs))]
        return Bands(cutoffs, factor, True, tied_projections, False, first_projected, True)

    def _translate_positions(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        # sinusoids: they follow from the width
        tensors.skip("pos_emb.inv_freq")
        return {}

    def _take_biases(self, tensors: ForeignTensors) -> list[Sequence[Tensor]]:
        """Vectors u and v of each layer, (H, d_h)."""
        names = [[f"layers.{n}.dec_attn.{name}" for n in range(self._layers)] for name in _BIASES]
        shape = self._heads, self._width // self._heads
        if not self._untied_biases:
            # Hugging Face has the shared ones in each layer as well
            others = names if self._source == HUGGING_FACE else [[], []]
            both = zip(_BIASES, others, strict=True)
            return [[tensors.take_tied(name, n, *shape) for name, n in both]] * self._layers
        if self._source == TENSORFLOW:
            both = [tensors.take(name, self._layers, *shape) for name in _BIASES]
        else:
            both = [[tensors.take(name, *shape) for name in of_kind] for of_kind in names]
        return list(zip(*both, strict=True))

    def _translate_layers(self, tensors: ForeignTensors) -> Iterator[dict[str, Tensor]]:
        d, inner = self._width, self._inner
        for number, (u, v) in enumerate(self._take_biases(tensors)):
            attention, forward = f"layers.{number}.dec_attn.", f"layers.{number}.pos_ff."
            # (3·d, d) -> (d, d) three times
            query, key, value = tensors.take(f"{attention}qkv_net.weight", 3 * d, d).chunk(3)
            distances = tensors.take(f"{attention}r_net.weight", d, d)
            yield {
                "self_attn.q_proj.weight": query,
                "self_attn.k_proj.weight": key,
                "self_attn.v_proj.weight": value,
                "self_attn.out_proj.weight": tensors.take(f"{attention}o_net.weight", d, d),
                "self_attn.position_projection.proj.weight": distances,
                "self_attn.biases.u": u,
                "self_attn.biases.v": v,
                **tensors.take_affine("self_attn_layer_norm", f"{attention}layer_norm", d),
                **tensors.take_affine("final_layer_norm", f"{forward}layer_norm", d),
                **tensors.take_affine("feed_forward.fc1", f"{forward}CoreNet.0", inner, d),
                **tensors.take_affine("feed_forward.fc2", f"{forward}CoreNet.3", d, inner),
            }


class AdaptiveSpan(ForeignModel):
    """Adaptive span with feed-forward layers, and all-attention, of the adaptive-span code."""

    arch = "all_attention_lm"

    def __init__(self, config: ForeignConfig, vocabulary: ForeignVocabulary, source: str) -> None:
        super().__init__(config, vocabulary, source)
        self._layers = config.integer("nb_layers")
        self._heads = config.integer("nb_heads")
        self._width = config.integer("hidden_size")
        self._span = config.integer("attn_span")
        self._vectors = config.integer("pers_mem_size", 0, 0)
        self._inner = 0 if self._vectors else config.integer("inner_hidden_size")
        self._adaptive = config.flag("adapt_span_enabled", False)
        # no tensor shows it
        self._ramp = config.integer("adapt_span_ramp") if self._adaptive else None
        self._dropouts = config.rate("dropout"), config.rate("emb_dropout")
        self.tokens_per_sample = config.integer("block_size", 512)
        self._check_size(config.integer("vocab_size", len(vocabulary)))
        bands = self._read_bands() if config.flag("adapt_io_enabled", False) else None
        if bands is None:
            self._renaming += _ADAPTIVE_SPAN_WHOLE
        self._embeddings = Embeddings(vocabulary, self._width, False, bands)

    def options(self) -> dict[str, Any]:
        """Options of the model."""
        dropout, embed_dropout = self._dropouts
        of_spans = {"adaptive_span": True, "span_ramp": self._ramp, "span_epsilon": _EPSILON}
        return {
            "decoder_layers": self._layers,
            "decoder_embed_dim": self._width,
            "decoder_attention_heads": self._heads,
            "decoder_ffn_embed_dim": self._inner,
            "persistent_vectors": self._vectors,
            "attention_span": self._span,
            **(of_spans if self._adaptive else {}),
            "zero_memory": True,
            "attention_dropout": dropout,
            "activation_dropout": dropout if self._inner else 0.0,
            "embed_dropout": embed_dropout,
            "output_dropout": embed_dropout,
            **self._embeddings.options(),
        }

    def _read_bands(self) -> Bands | None:
        cutoffs = self._config.numbers("adapt_io_cutoffs")
        factor = self._config.integer("adapt_io_divval", 4, least=2)
        tied = self._config.flag("adapt_io_tied", False)
        if not cutoffs:
            return None
        self._check_cutoffs("adapt_io_cutoffs", cutoffs)
        return Bands(cutoffs, factor, tied, [tied] * (len(cutoffs) + 1))

    def _translate_positions(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        # (1, d_h, L), the farthest distance first -> (L, d_h), the nearest first
        positions = tensors.take("key_pe", 1, self._width // self._heads, self._span)
        return {"decoder.positions.weight": positions[0].T.flip(0)}

    def _translate_layers(self, tensors: ForeignTensors) -> Iterator[dict[str, Tensor]]:
        for number in range(self._layers):
            yield self._translate_layer(tensors, f"layers.{number}.")

    def _translate_layer(self, tensors: ForeignTensors, source: str) -> dict[str, Tensor]:
        d, inner, heads, vectors = self._width, self._inner, self._heads, self._vectors
        attention = f"{source}attn.attn."
        memory = f"{attention}persistent_memory."
        projections = {"q": "query", "k": "key", "v": "val", "out": "out"}
        found = {
            f"self_attn.{ours}_proj.weight": tensors.take(f"{source}attn.proj_{name}.weight", d, d)
            for ours, name in projections.items()
        }
        found |= tensors.take_affine("self_attn_layer_norm", f"{source}norm1", d)
        if vectors:
            # (H, d_h, N) -> (H, N, d_h)
            keys = tensors.take(f"{memory}key", heads, d // heads, vectors).transpose(1, 2)
            found["self_attn.persistent.keys"] = keys
            values = tensors.take(f"{memory}val", heads, vectors, d // heads)
            found["self_attn.persistent.values"] = values
        else:
            found |= tensors.take_affine("feed_forward.fc1", f"{source}ff.fc1", inner, d)
            found |= tensors.take_affine("feed_forward.fc2", f"{source}ff.fc2", d, inner)
            found |= tensors.take_affine("final_layer_norm", f"{source}norm2", d)
        if self._adaptive:
            # (H, 1, 1) -> (H,); the persistent vectors' module holds the same spans once more
            mask, again = (f"{owner}adaptive_span._mask." for owner in (attention, memory))
            spans = tensors.take_tied(f"{mask}current_val", [f"{again}current_val"], heads, 1, 1)
            found["self_attn.span.value"] = spans.flatten()
            tensors.skip(f"{mask}mask_template")
            tensors.skip(f"{again}mask_template")
        return found
