"""Convert models of other code to ours: their options, and their tensors under our names.

Shapes: H heads, d model width, d_h head width, L largest span, N persistent vectors.
"""

from typing import Any

from torch import Tensor

from scripts.convert import ADAPTIVE_SPAN, HUGGING_FACE, TENSORFLOW, TRANSFORMER_XL
from scripts.convert._embeddings import Bands, convert_embeddings
from scripts.convert._options import ForeignConfig, ForeignVocabulary
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
        (r"^\w+\.(emb|out)_layers\.(\d+)\.weight", r"adaptive_embed/cutoff_\2/lookup_table"),
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
_ONE_TABLE = (r"adaptive_embed/cutoff_0/", "adaptive_embed/")
_ONE_BIAS = (r"adaptive_softmax/cutoff_0/b$", "adaptive_softmax/bias")
_ADAPTIVE_SPAN_UNBANDED = (r"^(in|out)_emb\.(emb|out)_layers\.0\.", r"\1_emb.")
# the original adaptive span adds this to the sum of masked attention weights
_EPSILON = 1e-8
Converted = tuple[str, dict[str, Any], dict[str, Tensor]]


def convert_model(
    config: ForeignConfig, vocabulary: ForeignVocabulary, source: str, checkpoint: dict[str, Tensor]
) -> Converted:
    """Return architecture, options and weights of our model that equals one of other code."""
    # Hugging Face's file may have both names
    for name in ("n_token", "vocab_size"):
        config.expect(name, len(vocabulary), "give the --vocab of this model")
    if source == ADAPTIVE_SPAN:
        return _convert_adaptive_span(config, vocabulary, checkpoint)
    return _convert_transformer_xl(config, vocabulary, source, checkpoint)


def _convert_transformer_xl(
    config: ForeignConfig, vocabulary: ForeignVocabulary, source: str, checkpoint: dict[str, Tensor]
) -> Converted:
    """Convert a Transformer-XL of the original PyTorch or TensorFlow code, or of Hugging Face.

    All have the same layers. Hugging Face and TensorFlow order the cluster logits from first to
    last and start with a past of zero vectors. TensorFlow stores matrices as (in, out), ties the
    embeddings, and has another epsilon in norms; with ``same_length`` a token sees one more token.
    """
    d, heads, inner = (config.take(name, int) for name in ("d_model", "n_head", "d_inner"))
    layers, untie_r = config.take("n_layer", int), config.take("untie_r", bool, False)
    clamp_len = config.take("clamp_len", int)
    dropouts = ("dropout", "embed_dropout", "output_dropout", "activation_dropout")
    options = {
        "decoder_layers": layers,
        "decoder_embed_dim": d,
        "decoder_attention_heads": heads,
        "decoder_ffn_embed_dim": inner,
        "untie_r": untie_r,
        # these two and clamp_len have no default: no tensor reveals them if they are misspelt
        "mem_len": config.take("mem_len", int),
        "same_length": config.take("same_length", bool),
        "zero_past": source != TRANSFORMER_XL,
        "clamp_len": clamp_len if clamp_len > 0 else None,
        **dict.fromkeys(dropouts, config.take("dropout", float, 0.0)),
        "attention_dropout": config.take("dropatt", float, 0.0),
        "tokens_per_sample": config.take("tgt_len", int, 128),
    }
    config.expect("d_head", d // heads, "here d_head is d_model / n_head")
    config.expect("d_embed", d, "here d_embed is d_model")
    cutoffs = config.take("cutoffs", list)
    factor = config.take("div_val", int, 1) if cutoffs else 1
    tied, first_projected, renaming = True, True, list(_RENAMING[source])
    # bands as wide as the model have no projections
    tied_projections = [True] * (len(cutoffs) + 1)
    if source == TENSORFLOW:
        options |= {"layer_norm_epsilon": 1e-12, "same_length_excludes_self": True}
        renaming += [_ONE_TABLE] if factor == 1 else []
        renaming += [] if cutoffs else [_ONE_BIAS]
        if cutoffs:
            shared = config.take("proj_share_all_but_first", bool, False)
            tied_projections = [False, *([shared] * len(cutoffs))]
            first_projected = config.take("proj_same_dim", bool, True)
    else:
        # no tensor reveals it either
        pre_norm = config.take("pre_lnorm", bool, False if source == HUGGING_FACE else None)
        options |= {"decoder_normalize_before": pre_norm, "no_decoder_final_norm": pre_norm}
        # newer versions of Hugging Face's code have a name of their own
        newer = "tie_word_embeddings" in config.values and "tie_weight" not in config.values
        tied = config.take("tie_word_embeddings" if newer else "tie_weight", bool, True)
        config.expect("attn_type", 0, "only 0, Transformer-XL's own attention, is supported")
        config.expect("ext_len", 0, "import it with 0, and evaluate with --extended-context")
        config.expect("layer_norm_epsilon", 1e-5, "only 1e-05 is supported")
        if factor > 1:
            tied_projections = config.take("tie_projs", list)

    tensors = ForeignTensors(checkpoint, renaming)
    bands = Bands(tied, cutoffs, factor, tied_projections, first_projected)
    more_options, weights = convert_embeddings(tensors, vocabulary, source, d, bands)
    for ours, theirs in {"u": "r_w_bias", "v": "r_r_bias"}.items():
        names = [f"layers.{number}.dec_attn.{theirs}" for number in range(layers)]
        if untie_r and source == TENSORFLOW:
            vectors = tensors.take(theirs, layers, heads, d // heads)
        elif untie_r:
            vectors = [tensors.take(name, heads, d // heads) for name in names]
        else:
            # Hugging Face stores shared vectors in each layer as well
            again = names if source == HUGGING_FACE else []
            vectors = [tensors.take_tied(theirs, again, heads, d // heads)]
        for number, vector in enumerate(vectors):
            weights[f"decoder.network.layers.{number}.self_attn.biases.{ours}"] = vector
    for number in range(layers):
        ours, theirs = f"decoder.network.layers.{number}", f"layers.{number}"
        attended, attention = f"{ours}.self_attn", f"{theirs}.dec_attn"
        # (3·d, d) -> (d, d) three times
        parts = tensors.take(f"{attention}.qkv_net.weight", 3 * d, d).chunk(3)
        for name, part in zip("qkv", parts, strict=True):
            weights[f"{attended}.{name}_proj.weight"] = part
        for name, net in {"out_proj": "o_net", "position_projection.proj": "r_net"}.items():
            weights[f"{attended}.{name}.weight"] = tensors.take(f"{attention}.{net}.weight", d, d)
        for name, part, *shape in (
            ("self_attn_layer_norm", "dec_attn.layer_norm", d),
            ("feed_forward.fc1", "pos_ff.CoreNet.0", inner, d),
            ("feed_forward.fc2", "pos_ff.CoreNet.3", d, inner),
            ("final_layer_norm", "pos_ff.layer_norm", d),
        ):
            weights |= tensors.take_affine(f"{ours}.{name}", f"{theirs}.{part}", *shape)
    # the sinusoids follow from the width
    tensors.skip("pos_emb.inv_freq")
    tensors.check_all_used()
    return "transformer_xl", {**options, **more_options}, weights


def _convert_adaptive_span(
    config: ForeignConfig, vocabulary: ForeignVocabulary, checkpoint: dict[str, Tensor]
) -> Converted:
    """Convert a model of the adaptive-span code, with feed-forward layers or all-attention."""
    layers, d, heads = (config.take(x, int) for x in ("nb_layers", "hidden_size", "nb_heads"))
    vectors, span = config.take("pers_mem_size", int, 0), config.take("attn_span", int)
    inner = 0 if vectors else config.take("inner_hidden_size", int)
    adaptive = config.take("adapt_span_enabled", bool, False)
    dropout = config.take("dropout", float, 0.0)
    embed_dropout = config.take("emb_dropout", float, 0.0)
    options = {
        "decoder_layers": layers,
        "decoder_embed_dim": d,
        "decoder_attention_heads": heads,
        "decoder_ffn_embed_dim": inner,
        "persistent_vectors": vectors,
        "attention_span": span,
        "adaptive_span": adaptive,
        "zero_past": True,
        "attention_dropout": dropout,
        "activation_dropout": dropout if inner else 0.0,
        "embed_dropout": embed_dropout,
        "output_dropout": embed_dropout,
        "tokens_per_sample": config.take("block_size", int, 512),
    }
    if adaptive:
        # no tensor reveals it
        options |= {"span_ramp": config.take("adapt_span_ramp", int), "span_epsilon": _EPSILON}
    cutoffs, factor, tied = [], 1, False
    if config.take("adapt_io_enabled", bool, False):
        cutoffs = config.take("adapt_io_cutoffs", list)
        factor = config.take("adapt_io_divval", int, 4)
        tied = config.take("adapt_io_tied", bool, False)

    renaming = _RENAMING[ADAPTIVE_SPAN] + ([] if cutoffs else [_ADAPTIVE_SPAN_UNBANDED])
    tensors = ForeignTensors(checkpoint, renaming)
    bands = Bands(tied, cutoffs, factor, [tied] * (len(cutoffs) + 1))
    more_options, weights = convert_embeddings(tensors, vocabulary, ADAPTIVE_SPAN, d, bands)
    # (1, d_h, L), the farthest distance first -> (L, d_h), the nearest first
    positions = tensors.take("key_pe", 1, d // heads, span)
    weights["decoder.network.positions.weight"] = positions[0].T.flip(0)
    for number in range(layers):
        ours, theirs = f"decoder.network.layers.{number}", f"layers.{number}"
        attended, attention = f"{ours}.self_attn", f"{theirs}.attn.attn"
        persistent = f"{attention}.persistent_memory"
        for name, part in {"q": "query", "k": "key", "v": "val", "out": "out"}.items():
            projection = tensors.take(f"{theirs}.attn.proj_{part}.weight", d, d)
            weights[f"{attended}.{name}_proj.weight"] = projection
        affine = [("self_attn_layer_norm", "norm1", d)]
        if vectors:
            # (H, d_h, N) -> (H, N, d_h)
            keys = tensors.take(f"{persistent}.key", heads, d // heads, vectors).transpose(1, 2)
            weights[f"{attended}.persistent.keys"] = keys
            values = tensors.take(f"{persistent}.val", heads, vectors, d // heads)
            weights[f"{attended}.persistent.values"] = values
        else:
            affine.append(("feed_forward.fc1", "ff.fc1", inner, d))
            affine.append(("feed_forward.fc2", "ff.fc2", d, inner))
            affine.append(("final_layer_norm", "norm2", d))
        for name, part, *shape in affine:
            weights |= tensors.take_affine(f"{ours}.{name}", f"{theirs}.{part}", *shape)
        if adaptive:
            # (H, 1, 1) -> (H,); the persistent vectors' module holds a copy of the spans
            mask, again = (f"{owner}.adaptive_span._mask" for owner in (attention, persistent))
            spans = tensors.take_tied(f"{mask}.current_val", [f"{again}.current_val"], heads, 1, 1)
            weights[f"{attended}.span.value"] = spans.flatten()
            tensors.skip(f"{mask}.mask_template")
            tensors.skip(f"{again}.mask_template")
    tensors.check_all_used()
    return "all_attention_lm", {**options, **more_options}, weights
