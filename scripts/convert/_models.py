"""Convert models of other code to ours: their options, and their tensors under our names.

Shapes: H heads, d model width, d_h head width, L largest span, N persistent vectors.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from scripts.convert import ADAPTIVE_SPAN, HUGGING_FACE, TENSORFLOW, TRANSFORMER_XL
from scripts.convert._embeddings import Embeddings
from scripts.convert._options import EOS, UNK, ForeignConfig, ForeignVocabulary
from scripts.convert._tensors import ForeignTensors

# Successive replacements that turn names of Transformer-XL's PyTorch code into a source's names.
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
# names without bands, or with bands as wide as the model
_ONE_TABLE = [(r"adaptive_embed/cutoff_0/", "adaptive_embed/")]
_ONE_BIAS = [(r"adaptive_softmax/cutoff_0/b$", "adaptive_softmax/bias")]
_ADAPTIVE_SPAN_UNBANDED = [
    (r"^in_emb\.emb_layers\.0\.", "in_emb."),
    (r"^out_emb\.out_layers\.0\.", "out_emb."),
]
# matrices that TensorFlow stores as (in, out)
_TENSORFLOW_MATRICES = r"/(kernel|proj|proj_W)$"
# vectors u and v
_BIASES = ("r_w_bias", "r_r_bias")
# the original adaptive span adds this to the sum of masked attention weights
_EPSILON = 1e-8


class ForeignModel(NamedTuple):
    """A model of other code, described by our options, and the way to convert its tensors.

    Args:
        source: the code that it comes from, one of SOURCES.
        arch: name of our model.
        options: options of our model.
        embeddings: the model's input and output.
        renaming: replacements that yield the checkpoint's names.
    """

    source: str
    arch: str
    options: dict[str, Any]
    embeddings: Embeddings
    renaming: list[tuple[str, str]]

    def translate(self, checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the checkpoint's tensors to the weights of our model."""
        transposed = (_TENSORFLOW_MATRICES,) if self.source == TENSORFLOW else ()
        tensors = ForeignTensors(checkpoint, self.renaming, *transposed)
        weights = self.embeddings.translate(tensors)
        if self.source == ADAPTIVE_SPAN:
            weights |= _translate_adaptive_span(tensors, self.options)
        else:
            weights |= _translate_transformer_xl(tensors, self.options, self.source)
        tensors.check_all_used()
        return weights


def read_model(config: ForeignConfig, vocabulary: ForeignVocabulary, source: str) -> ForeignModel:
    """Return the model of a source with these options and symbols."""
    if source == ADAPTIVE_SPAN:
        return _read_adaptive_span(config, vocabulary)
    return _read_transformer_xl(config, vocabulary, source)


def _check_size(config: ForeignConfig, vocabulary: ForeignVocabulary, size: int) -> None:
    if size != len(vocabulary):
        raise ValueError(
            f"{config.label}: it has {size} symbols, and the vocabulary has {len(vocabulary)}: "
            "give the --vocab of this model"
        )


def _read_cutoffs(config: ForeignConfig, vocabulary: ForeignVocabulary, name: str) -> list[int]:
    cutoffs = config.numbers(name)
    if cutoffs and cutoffs[-1] >= len(vocabulary):
        raise ValueError(
            f"{config.label}: {name} end at {cutoffs[-1]}, beyond the vocabulary: give the --vocab "
            "of this model"
        )
    if cutoffs and not vocabulary.fits_first_band(cutoffs[0]):
        raise ValueError(
            f"--vocab: {EOS} and {UNK} must be among the first {cutoffs[0]} symbols, the first "
            f"of the {name}: give the --vocab of this model"
        )
    return cutoffs


def _read_transformer_xl(
    config: ForeignConfig, vocabulary: ForeignVocabulary, source: str
) -> ForeignModel:
    """Read a Transformer-XL of the original PyTorch or TensorFlow code, or of Hugging Face.

    All have the same layers. Hugging Face and TensorFlow order the cluster logits from first to
    last and start with a past of zero vectors. TensorFlow stores matrices as (in, out), ties the
    embeddings, and has another epsilon in norms; with ``same_length`` a token sees one more token.
    """
    width, heads = config.integer("d_model"), config.integer("n_head")
    # required, because no tensor reveals them: a default would hide a misspelt option
    mem_len, same_length = config.integer("mem_len", minimum=0), config.flag("same_length")
    clamp_len = config.integer("clamp_len", minimum=-1)
    dropouts = ("dropout", "embed_dropout", "output_dropout", "activation_dropout")
    options = {
        "decoder_layers": config.integer("n_layer"),
        "decoder_embed_dim": width,
        "decoder_attention_heads": heads,
        "decoder_ffn_embed_dim": config.integer("d_inner"),
        "untie_r": config.flag("untie_r", False),
        "mem_len": mem_len,
        "same_length": same_length,
        "zero_memory": source != TRANSFORMER_XL,
        "clamp_len": clamp_len if clamp_len > 0 else None,
        **dict.fromkeys(dropouts, config.rate("dropout")),
        "attention_dropout": config.rate("dropatt"),
        "tokens_per_sample": config.integer("tgt_len", 128),
    }
    config.expect("d_head", width // heads, "here d_head is d_model / n_head")
    config.expect("d_embed", width, "here d_embed is d_model")
    renaming, tied = list(_RENAMING[source]), True
    if source == TENSORFLOW:
        _check_size(config, vocabulary, config.integer("n_token", len(vocabulary)))
        options |= {"layer_norm_epsilon": 1e-12, "same_length_besides_itself": True}
    else:
        hugging_face = source == HUGGING_FACE
        # no tensor reveals it either
        pre_norm = config.flag("pre_lnorm", False if hugging_face else None)
        options |= {"decoder_normalize_before": pre_norm, "no_decoder_final_norm": pre_norm}
        # older versions of transformers use the original's names
        size = config.first_name("vocab_size", "n_token") if hugging_face else "n_token"
        _check_size(config, vocabulary, config.integer(size))
        name = config.first_name("tie_weight", "tie_word_embeddings")
        tied = config.flag(name if hugging_face else "tie_weight", True)
        config.expect("attn_type", 0, "only 0, Transformer-XL's own attention, is supported")
        config.expect("ext_len", 0, "import it with 0, and evaluate with --extended-context")
        config.expect("layer_norm_epsilon", 1e-5, "only 1e-05 is supported")
    embeddings = _read_embeddings(config, vocabulary, source, width, tied)
    if source == TENSORFLOW:
        renaming += [] if embeddings.cutoffs else _ONE_BIAS
        renaming += _ONE_TABLE if embeddings.factor == 1 else []
    options |= embeddings.options()
    return ForeignModel(source, "transformer_xl", options, embeddings, renaming)


def _read_embeddings(
    config: ForeignConfig, vocabulary: ForeignVocabulary, source: str, width: int, tied: bool
) -> Embeddings:
    cutoffs = _read_cutoffs(config, vocabulary, "cutoffs")
    if not cutoffs:
        if source == TENSORFLOW:
            reason = "without cutoffs there is one band, as wide as the model"
            config.expect("div_val", 1, reason)
        return Embeddings(vocabulary, width, tied)
    factor, first_projected = config.integer("div_val", 1), True
    # bands as wide as the model have no projections
    tied_projections = [True] * (len(cutoffs) + 1)
    if source == TENSORFLOW:
        shared = config.flag("proj_share_all_but_first", False)
        tied_projections = [False, *([shared] * len(cutoffs))]
        first_projected = config.flag("proj_same_dim", True)
    elif factor != 1:
        tied_projections = config.flags("tie_projs", len(cutoffs) + 1)
    layout = source == TRANSFORMER_XL, first_projected, source == TENSORFLOW
    return Embeddings(vocabulary, width, tied, cutoffs, factor, tied_projections, *layout)


def _take_biases(
    tensors: ForeignTensors, options: dict[str, Any], source: str, *shape: int
) -> list[Sequence[Tensor]]:
    """Return the vectors u and v of each layer, (H, d_h)."""
    layers = options["decoder_layers"]
    names = [[f"layers.{n}.dec_attn.{name}" for n in range(layers)] for name in _BIASES]
    if not options["untie_r"]:
        # Hugging Face stores shared vectors in each layer as well
        others = names if source == HUGGING_FACE else [[], []]
        both = zip(_BIASES, others, strict=True)
        return [[tensors.take_tied(name, n, *shape) for name, n in both]] * layers
    if source == TENSORFLOW:
        both = [tensors.take(name, layers, *shape) for name in _BIASES]
    else:
        both = [[tensors.take(name, *shape) for name in kind] for kind in names]
    return list(zip(*both, strict=True))


def _translate_transformer_xl(
    tensors: ForeignTensors, options: dict[str, Any], source: str
) -> dict[str, Tensor]:
    """Return the weights of all layers."""
    d, inner = options["decoder_embed_dim"], options["decoder_ffn_embed_dim"]
    heads = options["decoder_attention_heads"]
    weights = {}
    for number, biases in enumerate(_take_biases(tensors, options, source, heads, d // heads)):
        ours, attention = f"decoder.network.layers.{number}", f"layers.{number}.dec_attn"
        forward, attended = f"layers.{number}.pos_ff", f"{ours}.self_attn"
        # (3·d, d) -> (d, d) three times
        parts = tensors.take(f"{attention}.qkv_net.weight", 3 * d, d).chunk(3)
        weights |= {
            f"{attended}.{x}_proj.weight": part for x, part in zip("qkv", parts, strict=True)
        }
        weights |= {f"{attended}.biases.{x}": bias for x, bias in zip("uv", biases, strict=True)}
        for name, theirs in (("out_proj", "o_net"), ("position_projection.proj", "r_net")):
            weights[f"{attended}.{name}.weight"] = tensors.take(
                f"{attention}.{theirs}.weight", d, d
            )
        weights |= tensors.take_affine(f"{attended}_layer_norm", f"{attention}.layer_norm", d)
        weights |= tensors.take_affine(f"{ours}.final_layer_norm", f"{forward}.layer_norm", d)
        for name, theirs, *shape in (
            ("fc1", "CoreNet.0", inner, d),
            ("fc2", "CoreNet.3", d, inner),
        ):
            ours_forward, theirs = f"{ours}.feed_forward.{name}", f"{forward}.{theirs}"
            weights |= tensors.take_affine(ours_forward, theirs, *shape)
    # the sinusoids follow from the width
    tensors.skip("pos_emb.inv_freq")
    return weights


def _read_adaptive_span(config: ForeignConfig, vocabulary: ForeignVocabulary) -> ForeignModel:
    """Read a model of the adaptive-span code, with feed-forward layers or all-attention."""
    vectors = config.integer("pers_mem_size", 0, 0)
    inner = 0 if vectors else config.integer("inner_hidden_size")
    dropout, embed_dropout = config.rate("dropout"), config.rate("emb_dropout")
    options = {
        "decoder_layers": config.integer("nb_layers"),
        "decoder_embed_dim": config.integer("hidden_size"),
        "decoder_attention_heads": config.integer("nb_heads"),
        "decoder_ffn_embed_dim": inner,
        "persistent_vectors": vectors,
        "attention_span": config.integer("attn_span"),
        "adaptive_span": config.flag("adapt_span_enabled", False),
        "zero_memory": True,
        "attention_dropout": dropout,
        "activation_dropout": dropout if inner else 0.0,
        "embed_dropout": embed_dropout,
        "output_dropout": embed_dropout,
        "tokens_per_sample": config.integer("block_size", 512),
    }
    if options["adaptive_span"]:
        # no tensor reveals it
        options |= {"span_ramp": config.integer("adapt_span_ramp"), "span_epsilon": _EPSILON}
    _check_size(config, vocabulary, config.integer("vocab_size", len(vocabulary)))
    renaming, width = list(_RENAMING[ADAPTIVE_SPAN]), options["decoder_embed_dim"]
    embeddings = Embeddings(vocabulary, width, tied=False)
    if config.flag("adapt_io_enabled", False):
        cutoffs = _read_cutoffs(config, vocabulary, "adapt_io_cutoffs")
        factor = config.integer("adapt_io_divval", 4, minimum=2)
        tied = config.flag("adapt_io_tied", False)
        if cutoffs:
            ties = tied, cutoffs, factor, [tied] * (len(cutoffs) + 1)
            embeddings = Embeddings(vocabulary, width, *ties)
    renaming += [] if embeddings.cutoffs else _ADAPTIVE_SPAN_UNBANDED
    options |= embeddings.options()
    return ForeignModel(ADAPTIVE_SPAN, "all_attention_lm", options, embeddings, renaming)


def _translate_adaptive_span(tensors: ForeignTensors, options: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights of all layers and of the positions that they share."""
    d, inner = options["decoder_embed_dim"], options["decoder_ffn_embed_dim"]
    heads, vectors = options["decoder_attention_heads"], options["persistent_vectors"]
    # (1, d_h, L), the farthest distance first -> (L, d_h), the nearest first
    positions = tensors.take("key_pe", 1, d // heads, options["attention_span"])
    weights = {"decoder.network.positions.weight": positions[0].T.flip(0)}
    for number in range(options["decoder_layers"]):
        ours, theirs = f"decoder.network.layers.{number}", f"layers.{number}"
        attention = f"{theirs}.attn.attn"
        vectors_module = f"{attention}.persistent_memory"
        for name, their_name in {"q": "query", "k": "key", "v": "val", "out": "out"}.items():
            projection = tensors.take(f"{theirs}.attn.proj_{their_name}.weight", d, d)
            weights[f"{ours}.self_attn.{name}_proj.weight"] = projection
        weights |= tensors.take_affine(f"{ours}.self_attn_layer_norm", f"{theirs}.norm1", d)
        if vectors:
            # (H, d_h, N) -> (H, N, d_h)
            keys = tensors.take(f"{vectors_module}.key", heads, d // heads, vectors).transpose(1, 2)
            weights[f"{ours}.self_attn.persistent.keys"] = keys
            values = tensors.take(f"{vectors_module}.val", heads, vectors, d // heads)
            weights[f"{ours}.self_attn.persistent.values"] = values
        else:
            forward = f"{ours}.feed_forward"
            weights |= tensors.take_affine(f"{forward}.fc1", f"{theirs}.ff.fc1", inner, d)
            weights |= tensors.take_affine(f"{forward}.fc2", f"{theirs}.ff.fc2", d, inner)
            weights |= tensors.take_affine(f"{ours}.final_layer_norm", f"{theirs}.norm2", d)
        if options["adaptive_span"]:
            # (H, 1, 1) -> (H,); the persistent vectors' module holds a copy of the spans
            mask, again = (f"{owner}.adaptive_span._mask" for owner in (attention, vectors_module))
            spans = tensors.take_tied(f"{mask}.current_val", [f"{again}.current_val"], heads, 1, 1)
            weights[f"{ours}.self_attn.span.value"] = spans.flatten()
            tensors.skip(f"{mask}.mask_template")
            tensors.skip(f"{again}.mask_template")
    return weights
