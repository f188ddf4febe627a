"""Models of other code as ours: their options, and their tensors by our names.

Shapes: H heads, d model width, d_h head width, L largest span, N persistent vectors.
"""

from typing import Any

from torch import Tensor

from scripts.convert._embeddings import Bands, Embeddings, Names, TensorFlowEmbeddings
from scripts.convert._foreign import EOS, UNK, ForeignConfig, ForeignTensors, ForeignVocabulary

_TRANSFORMER_XL = Names(
    embedding="word_emb.emb_layers.{}.weight",
    input_projection="word_emb.emb_projs.{}",
    output="crit.out_layers.{}",
    output_projection="crit.out_projs.{}",
    clusters="crit.cluster_weight",
    cluster_bias="crit.cluster_bias",
)
_HUGGING_FACE = _TRANSFORMER_XL._replace(
    embedding="transformer.word_emb.emb_layers.{}.weight",
    input_projection="transformer.word_emb.emb_projs.{}",
)
_ADAPTIVE_SPAN = Names(
    embedding="in_emb.emb_layers.{}.weight",
    input_projection="in_emb.emb_projs.{}",
    output="out_emb.out_layers.{}",
    output_projection="out_emb.out_projs.{}",
    clusters="out_emb.cluster_proj.weight",
    cluster_bias="out_emb.cluster_proj.bias",
)
# vectors u and v
_BIASES = ("r_w_bias", "r_r_bias")
# what the original adaptive span adds to the sum of masked attention weights
_EPSILON = 1e-8


class TransformerXLImport:
    """Transformer-XL of the original PyTorch code, and of Hugging Face transformers.

    Both have the same layers. The latter's names begin with ``transformer.``, its layers may have
    vectors u and v of their own, its adaptive softmax has the clusters' logits first to last, and
    its streams start with a memory of zero vectors.

    Args:
        config: its options, which are read here.
        vocabulary: its symbols.
        hugging_face: whether Hugging Face transformers wrote the files.
    """

    arch = "transformer_xl"

    def __init__(
        self, config: ForeignConfig, vocabulary: ForeignVocabulary, hugging_face: bool
    ) -> None:
        self._zero_memory = hugging_face
        self._prefix = "transformer." if hugging_face else ""
        self._read_options(config)
        # no tensor tells it either
        self._pre_norm = config.flag("pre_lnorm", False if hugging_face else None)
        # older versions of transformers have the original's names
        size, tied = "n_token", "tie_weight"
        if hugging_face:
            size = config.name_of("vocab_size", size)
            tied = config.name_of(tied, "tie_word_embeddings")
        _note_size(config, config.integer(size), vocabulary)
        config.expect("attn_type", 0, "only 0, Transformer-XL's own attention, is known")
        config.expect("ext_len", 0, "import it with 0, and evaluate with --extended-context")
        config.expect("layer_norm_epsilon", 1e-5, "only 1e-05 is known")
        names = _HUGGING_FACE if hugging_face else _TRANSFORMER_XL
        tied = bool(config.flag(tied, True))
        bands = _transformer_xl_bands(config, vocabulary, tied, not hugging_face)
        self._embeddings = Embeddings(vocabulary, self._width, tied, names, bands)

    def _read_options(self, config: ForeignConfig) -> None:
        """Read what is common to all code, and note what does not go together."""
        self._layers = config.layers("n_layer")
        self._heads = config.size("n_head")
        self._width = config.size("d_model")
        self._inner = config.size("d_inner")
        self._untied_biases = config.flag("untie_r", False)
        self._dropouts = config.rate("dropout"), config.rate("dropatt")
        # no tensor tells these: the original's own defaults would do where its option is misspelt
        self._mem_len = config.integer("mem_len", least=0)
        self._same_length = config.flag("same_length")
        self._clamp_len = config.integer("clamp_len", least=-1)
        self.tokens_per_sample = config.integer("tgt_len", default=128)
        if _heads_divide(config, "d_model", self._width, "n_head", self._heads):
            config.expect("d_head", self._width // self._heads, "here d_head is d_model / n_head")
            config.expect("d_embed", self._width, "here d_embed is d_model", self._width)
        if self._same_length and self._mem_len == 0:
            config.note("same_length with mem_len 0 leaves nothing to attend to")

    def options(self) -> dict[str, Any]:
        """Options of the model."""
        dropout, attention_dropout = self._dropouts
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
            "zero_memory": self._zero_memory,
            "clamp_len": self._clamp_len if self._clamp_len > 0 else None,
            "dropout": dropout,
            "embed_dropout": dropout,
            "output_dropout": dropout,
            "activation_dropout": dropout,
            "attention_dropout": attention_dropout,
            **self._embeddings.options(),
        }

    def translate(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        """Weights of the model."""
        found = self._embeddings.translate(tensors)
        # sinusoids: they follow from the width
        tensors.skip(f"{self._prefix}pos_emb.inv_freq")
        for number, biases in enumerate(self._biases(tensors)):
            of_layer = self._layer(tensors, number, biases)
            found |= {f"decoder.layers.{number}.{name}": value for name, value in of_layer.items()}
        return found

    def _biases(self, tensors: ForeignTensors) -> list[list[Tensor]]:
        """Vectors u and v of each layer, (H, d_h)."""
        shape = self._heads, self._width // self._heads
        prefixes = [f"{self._prefix}layers.{number}.dec_attn." for number in range(self._layers)]
        if self._untied_biases:
            return [
                [tensors.take(prefix + name, *shape) for name in _BIASES] for prefix in prefixes
            ]
        # transformers has the shared ones in each layer as well
        others = prefixes if self._prefix else []
        shared = [
            tensors.take_tied(f"{self._prefix}{name}", [other + name for other in others], *shape)
            for name in _BIASES
        ]
        return [shared] * self._layers

    def _layer(
        self, tensors: ForeignTensors, number: int, biases: list[Tensor]
    ) -> dict[str, Tensor]:
        source, d, inner = f"{self._prefix}layers.{number}.", self._width, self._inner
        attention = f"{source}dec_attn."
        # (3·d, d) -> (d, d) three times
        query, key, value = tensors.take(f"{attention}qkv_net.weight", 3 * d, d).chunk(3)
        forward = f"{source}pos_ff."
        return {
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.out_proj.weight": tensors.take(f"{attention}o_net.weight", d, d),
            "self_attn.distance_table.proj.weight": tensors.take(f"{attention}r_net.weight", d, d),
            "self_attn.biases.u": biases[0],
            "self_attn.biases.v": biases[1],
            **tensors.take_affine("self_attn_layer_norm", f"{attention}layer_norm", d),
            **tensors.take_affine("final_layer_norm", f"{forward}layer_norm", d),
            **tensors.take_affine("feed_forward.fc1", f"{forward}CoreNet.0", inner, d),
            **tensors.take_affine("feed_forward.fc2", f"{forward}CoreNet.3", d, inner),
        }


class TensorFlowImport(TransformerXLImport):
    """Transformer-XL of the original TensorFlow code, from which the published figures are.

    It has the layers of the PyTorch code, with matrices (in, out), norms with another epsilon, and
    a memory of zero vectors at the start. With ``same_length`` a token sees one token more.

    Args:
        config: its options, which are read here.
        vocabulary: its symbols.
    """

    def __init__(self, config: ForeignConfig, vocabulary: ForeignVocabulary) -> None:
        self._zero_memory = True
        self._prefix = "transformer/"
        self._pre_norm = False
        self._read_options(config)
        _note_size(config, config.integer("n_token", default=len(vocabulary)), vocabulary)
        bands = _tensorflow_bands(config, vocabulary)
        self._embeddings = TensorFlowEmbeddings(vocabulary, self._width, True, None, bands)

    def options(self) -> dict[str, Any]:
        """Options of the model."""
        own = {"layer_norm_epsilon": 1e-12, "same_length_besides_itself": True}
        return {**super().options(), **own}

    def _biases(self, tensors: ForeignTensors) -> list[list[Tensor]]:
        """Vectors u and v of each layer, (H, d_h), which are one tensor of all layers."""
        shape = self._heads, self._width // self._heads
        if self._untied_biases:
            shape = self._layers, *shape
        u, v = (tensors.take(self._prefix + name, *shape) for name in _BIASES)
        if not self._untied_biases:
            return [[u, v]] * self._layers
        return [list(pair) for pair in zip(u, v, strict=True)]

    def _layer(
        self, tensors: ForeignTensors, number: int, biases: list[Tensor]
    ) -> dict[str, Tensor]:
        source, d, inner = f"{self._prefix}layer_{number}", self._width, self._inner

        def matrix(name: str, rows: int, columns: int) -> Tensor:
            return tensors.take(f"{source}/{name}/kernel", rows, columns).T

        # (d, 3·d) -> (d, d) three times
        query, key, value = matrix("rel_attn/qkv", d, 3 * d).chunk(3)
        found = {
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.out_proj.weight": matrix("rel_attn/o", d, d),
            "self_attn.distance_table.proj.weight": matrix("rel_attn/r", d, d),
            "self_attn.biases.u": biases[0],
            "self_attn.biases.v": biases[1],
            "feed_forward.fc1.weight": matrix("ff/layer_1", d, inner),
            "feed_forward.fc1.bias": tensors.take(f"{source}/ff/layer_1/bias", inner),
            "feed_forward.fc2.weight": matrix("ff/layer_2", inner, d),
            "feed_forward.fc2.bias": tensors.take(f"{source}/ff/layer_2/bias", d),
        }
        for ours, theirs in (("self_attn_layer_norm", "rel_attn"), ("final_layer_norm", "ff")):
            for kind, name in (("weight", "gamma"), ("bias", "beta")):
                found[f"{ours}.{kind}"] = tensors.take(f"{source}/{theirs}/LayerNorm/{name}", d)
        return found


class AdaptiveSpanImport:
    """Adaptive span with feed-forward layers, and all-attention, of the adaptive-span code.

    Args:
        config: its options, which are read here.
        vocabulary: its symbols.
    """

    arch = "all_attention_lm"

    def __init__(self, config: ForeignConfig, vocabulary: ForeignVocabulary) -> None:
        self._layers = config.layers("nb_layers")
        self._heads = config.size("nb_heads")
        self._width = config.size("hidden_size")
        self._span = config.size("attn_span")
        self._vectors = config.size("pers_mem_size", 0, 0)
        self._inner = 0 if self._vectors else config.size("inner_hidden_size")
        self._adaptive = config.flag("adapt_span_enabled", False)
        # no tensor tells it
        self._ramp = config.integer("adapt_span_ramp") if self._adaptive else None
        self._dropouts = config.rate("dropout"), config.rate("emb_dropout")
        self.tokens_per_sample = config.integer("block_size", default=512)
        _heads_divide(config, "hidden_size", self._width, "nb_heads", self._heads)
        _note_size(config, config.integer("vocab_size", default=len(vocabulary)), vocabulary)
        bands = _adaptive_span_bands(config, vocabulary)
        names = _ADAPTIVE_SPAN
        if bands is None:
            names = names._replace(embedding="in_emb.weight", output="out_emb")
        self._embeddings = Embeddings(vocabulary, self._width, False, names, bands)

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

    def translate(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        """Weights of the model."""
        found = self._embeddings.translate(tensors)
        # (1, d_h, L), the farthest distance first -> (L, d_h), the nearest first
        positions = tensors.take("key_pe", 1, self._width // self._heads, self._span)
        found["decoder.positions.weight"] = positions[0].T.flip(0)
        for number in range(self._layers):
            of_layer = self._layer(tensors, f"layers.{number}.")
            found |= {f"decoder.layers.{number}.{name}": value for name, value in of_layer.items()}
        return found

    def _layer(self, tensors: ForeignTensors, source: str) -> dict[str, Tensor]:
        d, inner, heads, vectors = self._width, self._inner, self._heads, self._vectors
        attention = f"{source}attn.attn."
        memory = f"{attention}persistent_memory."
        projections = {"q": "query", "k": "key", "v": "val", "out": "out"}
        found = {
            f"self_attn.{ours}_proj.weight": tensors.take(f"{source}attn.proj_{name}.weight", d, d)
            for ours, name in projections.items()
        }
        if vectors:
            # (H, d_h, N) -> (H, N, d_h)
            keys = tensors.take(f"{memory}key", heads, d // heads, vectors).transpose(1, 2)
            found["self_attn.persistent.keys"] = keys
            values = tensors.take(f"{memory}val", heads, vectors, d // heads)
            found["self_attn.persistent.values"] = values
        else:
            found |= tensors.take_affine("feed_forward.fc1", f"{source}ff.fc1", inner, d)
            found |= tensors.take_affine("feed_forward.fc2", f"{source}ff.fc2", d, inner)
        found |= tensors.take_affine("self_attn_layer_norm", f"{source}norm1", d)
        if not vectors:
            found |= tensors.take_affine("final_layer_norm", f"{source}norm2", d)
        if self._adaptive:
            # (H, 1, 1) -> (H,); the persistent vectors' module holds the same spans once more
            mask, again = (f"{owner}adaptive_span._mask." for owner in (attention, memory))
            spans = tensors.take_tied(f"{mask}current_val", [f"{again}current_val"], *(heads, 1, 1))
            found["self_attn.span.value"] = spans.flatten()
            tensors.skip(f"{mask}mask_template")
            tensors.skip(f"{again}mask_template")
        return found


def _transformer_xl_bands(
    config: ForeignConfig, vocabulary: ForeignVocabulary, tied: bool, reversed_clusters: bool
) -> Bands | None:
    """How the adaptive softmax is made; None without one, and after a problem."""
    cutoffs = config.numbers("cutoffs")
    if not cutoffs:
        return None
    factor = config.integer("div_val", default=1)
    # bands as wide as the model have no projections
    tied_projections = [True] * (len(cutoffs) + 1)
    if factor != 1:
        tied_projections = config.flags("tie_projs", len(cutoffs) + 1)
    _note_misfit(config, "cutoffs", cutoffs, vocabulary)
    if factor is None or tied_projections is None:
        return None
    return Bands(cutoffs, factor, tied, tied_projections, reversed_clusters)


def _tensorflow_bands(config: ForeignConfig, vocabulary: ForeignVocabulary) -> Bands | None:
    """How the adaptive softmax is made; None without one, and after a problem."""
    cutoffs = config.numbers("cutoffs")
    if not cutoffs:
        config.expect("div_val", 1, "without cutoffs there is one band, as wide as the model")
        return None
    factor = config.integer("div_val", default=1)
    tied = config.flag("proj_share_all_but_first", False)
    first_projected = config.flag("proj_same_dim", True)
    _note_misfit(config, "cutoffs", cutoffs, vocabulary)
    if None in (factor, tied, first_projected):
        return None
    tied_projections = [False, *([tied] * len(cutoffs))]
    return Bands(cutoffs, factor, True, tied_projections, False, first_projected)


def _adaptive_span_bands(config: ForeignConfig, vocabulary: ForeignVocabulary) -> Bands | None:
    """How the adaptive input and softmax are made; None without them, and after a problem."""
    if not config.flag("adapt_io_enabled", False):
        return None
    cutoffs = config.numbers("adapt_io_cutoffs")
    factor = config.integer("adapt_io_divval", least=2, default=4)
    tied = config.flag("adapt_io_tied", False)
    if cutoffs == []:
        config.note("adapt_io_enabled is true and adapt_io_cutoffs are empty", False)
    if not cutoffs or factor is None or tied is None:
        return None
    _note_misfit(config, "adapt_io_cutoffs", cutoffs, vocabulary)
    return Bands(cutoffs, factor, tied, [tied] * (len(cutoffs) + 1))


def _note_size(config: ForeignConfig, size: int | None, vocabulary: ForeignVocabulary) -> None:
    if size is not None and size != len(vocabulary):
        config.note(f"it has {size} symbols, and the vocabulary has {len(vocabulary)}")


def _heads_divide(
    config: ForeignConfig, width_name: str, width: int | None, heads_name: str, heads: int | None
) -> bool:
    """Whether sizes that can be told go together; notes a problem where they do not."""
    if width is None or heads is None:
        return False
    if width % heads:
        config.note(f"{width_name} is {width}: {heads_name}, {heads}, must divide it", False)
    return width % heads == 0


def _note_misfit(
    config: ForeignConfig, name: str, cutoffs: list[int], vocabulary: ForeignVocabulary
) -> None:
    """Note cutoffs, the entry ``name`` of a configuration, that do not go with the vocabulary."""
    if cutoffs[-1] >= len(vocabulary):
        config.note(f"{name} end at {cutoffs[-1]}, beyond the vocabulary", False)
    if not vocabulary.fits_first_band(cutoffs[0]):
        config.note(f"{EOS} and {UNK} must be among the first {cutoffs[0]} symbols", False)
