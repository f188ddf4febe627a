"""Transformer-XL of the original PyTorch code, and of Hugging Face transformers, as ours.

Both have the same layers. The latter's names begin with ``transformer.``, its layers may have
vectors u and v of their own, its adaptive softmax has the clusters' logits first to last, and its
streams start with a memory of zero vectors.

Shapes: H heads, d model width, d_h head width.
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
    embedding="word_emb.emb_layers.{}.weight",
    input_projection="word_emb.emb_projs.{}",
    output="crit.out_layers.{}",
    output_projection="crit.out_projs.{}",
    clusters="crit.cluster_weight",
    cluster_bias="crit.cluster_bias",
)


class TransformerXLImport:
    """Reads the options of a Transformer-XL, then its tensors.

    Args:
        config: its options.
        vocabulary: its symbols.
        hugging_face: whether Hugging Face transformers wrote the files.
    """

    arch = "transformer_xl"

    def __init__(
        self, config: ForeignConfig, vocabulary: ForeignVocabulary, hugging_face: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._hugging_face = hugging_face
        self._prefix = "transformer." if hugging_face else ""
        self._layers = config.integer("n_layer")
        self._heads = config.integer("n_head")
        self._width = config.integer("d_model")
        self._inner = config.integer("d_inner")
        self._untied_biases = config.flag("untie_r", False)
        # no tensor tells these: the original's own defaults would do where its option is misspelt
        default = {"default": False} if hugging_face else {}
        self._pre_norm = config.flag("pre_lnorm", **default)
        self._dropouts = config.rate("dropout"), config.rate("dropatt")
        self._mem_len = config.integer("mem_len", least=0)
        self._same_length = config.flag("same_length")
        self._clamp_len = config.integer("clamp_len", least=-1)
        self.tokens_per_sample = config.integer("tgt_len", default=128)
        # older versions of transformers have the original's names
        size = config.integer(
            config.name_of("vocab_size", "n_token") if hugging_face else "n_token"
        )
        if size is not None and size != len(vocabulary):
            config.note(f"it has {size} symbols, and the vocabulary has {len(vocabulary)}")
        if self._width is not None and self._heads is not None:
            if self._width % self._heads:
                config.note(
                    f"d_model is {self._width}: n_head, {self._heads}, must divide it", False
                )
            else:
                config.expect(
                    "d_head", self._width // self._heads, "here d_head is d_model / n_head"
                )
            config.expect("d_embed", self._width, "here d_embed is d_model", self._width)
        config.expect("attn_type", 0, "only 0, Transformer-XL's own attention, is known")
        config.expect("ext_len", 0, "import it with 0, and evaluate with --extended-context")
        config.expect("layer_norm_epsilon", 1e-5, "only 1e-05 is known")
        if self._same_length and self._mem_len == 0:
            config.note("same_length with mem_len 0 leaves nothing to attend to")
        name = config.name_of("tie_weight", "tie_word_embeddings") if hugging_face else "tie_weight"
        tied = config.flag(name, True)
        self._tied = bool(tied)
        self._bands = self._read_bands(config, hugging_face)

    def _read_bands(self, config: ForeignConfig, hugging_face: bool) -> Bands | None:
        cutoffs = config.numbers("cutoffs")
        if not cutoffs:
            return None
        factor = config.integer("div_val", default=1)
        # bands as wide as the model have no projections
        tied_projections = [True] * (len(cutoffs) + 1)
        if factor != 1:
            tied_projections = config.flags("tie_projs", len(cutoffs) + 1)
        note_misfit(config, "cutoffs", cutoffs, self._vocabulary)
        if factor is None or tied_projections is None:
            return None
        return Bands(cutoffs, factor, self._tied, tied_projections, not hugging_face)

    def options(self) -> dict[str, Any]:
        """Options of the model."""
        dropout, attention_dropout = self._dropouts
        of_embeddings = (
            adaptive_options(self._bands, self._vocabulary)
            if self._bands
            else plain_options(self._tied)
        )
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
            "zero_memory": self._hugging_face,
            "clamp_len": self._clamp_len if self._clamp_len > 0 else None,
            "dropout": dropout,
            "embed_dropout": dropout,
            "output_dropout": dropout,
            "activation_dropout": dropout,
            "attention_dropout": attention_dropout,
            **of_embeddings,
        }

    def translate(self, tensors: ForeignTensors) -> dict[str, Tensor]:
        """Weights of the model."""
        names = _NAMES._replace(
            embedding=self._prefix + _NAMES.embedding,
            input_projection=self._prefix + _NAMES.input_projection,
        )
        if self._bands:
            found = translate_adaptive(tensors, self._vocabulary, self._width, self._bands, names)
        else:
            found = translate_plain(
                tensors,
                self._vocabulary,
                self._width,
                self._tied,
                names.embedding.format(0),
                names.output.format(0),
            )
        # sinusoids: they follow from the width
        tensors.skip(f"{self._prefix}pos_emb.inv_freq")
        shared = None if self._untied_biases else self._shared_biases(tensors)
        for number in range(self._layers):
            source, target = f"{self._prefix}layers.{number}.", f"decoder.layers.{number}."
            found.update(self._layer(tensors, source, target, shared))
        return found

    def _biases(self, tensors: ForeignTensors, prefix: str) -> tuple[Tensor, Tensor]:
        """Vectors u and v, each (H, d_h)."""
        shape = self._heads, self._width // self._heads
        return tensors.take(f"{prefix}r_w_bias", *shape), tensors.take(f"{prefix}r_r_bias", *shape)

    def _shared_biases(self, tensors: ForeignTensors) -> tuple[Tensor, Tensor]:
        """Those of all layers; transformers has them under each layer's name as well."""
        shape = self._heads, self._width // self._heads
        layers = range(self._layers if self._hugging_face else 0)
        return tuple(
            tensors.take_tied(
                f"{self._prefix}{name}",
                [f"{self._prefix}layers.{number}.dec_attn.{name}" for number in layers],
                *shape,
            )
            for name in ("r_w_bias", "r_r_bias")
        )

    def _layer(
        self,
        tensors: ForeignTensors,
        source: str,
        target: str,
        biases: tuple[Tensor, Tensor] | None,
    ) -> dict[str, Tensor]:
        d, inner = self._width, self._inner
        attention = f"{source}dec_attn."
        if biases is None:
            biases = self._biases(tensors, attention)
        # (3·d, d) -> (d, d) three times
        query, key, value = tensors.take(f"{attention}qkv_net.weight", 3 * d, d).chunk(3)
        found = {
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.out_proj.weight": tensors.take(f"{attention}o_net.weight", d, d),
            "self_attn.distance_table.proj.weight": tensors.take(f"{attention}r_net.weight", d, d),
            "self_attn.biases.u": biases[0],
            "self_attn.biases.v": biases[1],
        }
        for norm, name in (("self_attn", attention), ("final", f"{source}pos_ff.")):
            for kind in ("weight", "bias"):
                value = tensors.take(f"{name}layer_norm.{kind}", d)
                found[f"{norm}_layer_norm.{kind}"] = value
        for number, shape in ((0, (inner, d)), (3, (d, inner))):
            part = f"{source}pos_ff.CoreNet.{number}"
            fc = f"feed_forward.fc{1 if number == 0 else 2}"
            found[f"{fc}.weight"] = tensors.take(f"{part}.weight", *shape)
            found[f"{fc}.bias"] = tensors.take(f"{part}.bias", shape[0])
        return {f"{target}{name}": tensor for name, tensor in found.items()}
