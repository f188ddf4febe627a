"""Convert models of other code to ours: their options, and their tensors under our names.

Shapes: H heads, d model width, d_h head width, L largest span, N persistent vectors.
"""

from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from scripts.convert import ADAPTIVE_SPAN, HUGGING_FACE, TENSORFLOW, TRANSFORMER_XL
from scripts.convert._embeddings import Bands, convert_embeddings
from scripts.convert._options import ForeignConfig, ForeignVocabulary
from scripts.convert._tensors import ForeignTensors

_NAMES = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
_RENAMING = _NAMES["renaming"]
_LAYERS = "decoder.network.layers"
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
        renaming += _RENAMING["one table"] if factor == 1 else []
        renaming += [] if cutoffs else _RENAMING["one bias"]
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
            weights[f"{_LAYERS}.{number}.self_attn.biases.{ours}"] = vector
    for number in range(layers):
        # (3·d, d) -> (d, d) three times
        parts = tensors.take(f"layers.{number}.dec_attn.qkv_net.weight", 3 * d, d).chunk(3)
        for name, part in zip("qkv", parts, strict=True):
            weights[f"{_LAYERS}.{number}.self_attn.{name}_proj.weight"] = part
    weights |= _take_layers(tensors, TRANSFORMER_XL, layers, d=d, f=inner)
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

    renaming = _RENAMING[ADAPTIVE_SPAN] + ([] if cutoffs else _RENAMING["one band"])
    tensors = ForeignTensors(checkpoint, renaming)
    bands = Bands(tied, cutoffs, factor, [tied] * (len(cutoffs) + 1))
    more_options, weights = convert_embeddings(tensors, vocabulary, ADAPTIVE_SPAN, d, bands)
    # (1, d_h, L), the farthest distance first -> (L, d_h), the nearest first
    positions = tensors.take("key_pe", 1, d // heads, span)
    weights["decoder.network.positions.weight"] = positions[0].T.flip(0)
    weights |= _take_layers(tensors, ADAPTIVE_SPAN, layers, d=d)
    if not vectors:
        weights |= _take_layers(tensors, "adaptive-span feed-forward", layers, d=d, f=inner)
    for number in range(layers):
        attended, attention = f"{_LAYERS}.{number}.self_attn", f"layers.{number}.attn.attn"
        persistent = f"{attention}.persistent_memory"
        if vectors:
            # (H, d_h, N) -> (H, N, d_h)
            keys = tensors.take(f"{persistent}.key", heads, d // heads, vectors).transpose(1, 2)
            weights[f"{attended}.persistent.keys"] = keys
            values = tensors.take(f"{persistent}.val", heads, vectors, d // heads)
            weights[f"{attended}.persistent.values"] = values
        if adaptive:
            # (H, 1, 1) -> (H,); the persistent vectors' module holds a copy of the spans
            mask, again = (f"{owner}.adaptive_span._mask" for owner in (attention, persistent))
            spans = tensors.take_tied(f"{mask}.current_val", [f"{again}.current_val"], heads, 1, 1)
            weights[f"{attended}.span.value"] = spans.flatten()
            tensors.skip(f"{mask}.mask_template")
            tensors.skip(f"{again}.mask_template")
    tensors.check_all_used()
    return "all_attention_lm", {**options, **more_options}, weights


def _take_layers(
    tensors: ForeignTensors, names: str, layers: int, **sizes: int
) -> dict[str, Tensor]:
    """Return the tensors of all layers that a table of names lists, by our names."""
    weights = {}
    for number in range(layers):
        for name, (theirs, *shape) in _NAMES["layers"][names].items():
            ours, theirs = f"{_LAYERS}.{number}.{name}", f"layers.{number}.{theirs}"
            shape = [sizes[letter] for letter in shape]
            if name.endswith(".weight"):
                weights[ours] = tensors.take(theirs, *shape)
            else:
                weights |= tensors.take_affine(ours, theirs, *shape)
    return weights
