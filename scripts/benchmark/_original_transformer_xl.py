"""The published Transformer-XL code, imported from a checkout of the user's, to compare with.

None of that code is here: its licence is not this project's. It was written for the PyTorch of
2019, and three things make it run on today's: a CUDA version where PyTorch has none, which it reads
when imported; masks of booleans in place of bytes; and weights drawn here, which it leaves empty.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.decoder import SegmentDecoder
from scripts.benchmark._original_checkout import Checkout

CHECKOUT = Checkout(
    "https://github.com/kimiyoung/transformer-xl",
    "mem_transformer",
    "MemTransformerLM",
    folder="pytorch",
    places=("utils",),
)


def import_original(path: Path) -> type[nn.Module]:
    """The model's class in a checkout.

    Raises ValueError when it cannot be imported.
    """
    # it reads the version's two numbers, and makes no use of them
    with mock.patch.object(torch.version, "cuda", torch.version.cuda or "0.0"):
        return CHECKOUT.import_class(path)


@contextmanager
def boolean_masks() -> Iterator[None]:
    """Let ``Tensor.byte()`` make booleans: PyTorch takes masks of bytes no longer."""
    with mock.patch.object(Tensor, "byte", Tensor.bool):
        yield


class OriginalModel(nn.Module):
    """The published model with its memory, over batches as fairseq has them.

    Args:
        model_class: what :func:`import_original` returns.
        cfg: a TransformerXLConfig without dropout.
        cutoffs: where the bands of the adaptive embeddings end; [] for plain ones.
        symbols: V.
    """

    def __init__(
        self, model_class: type[nn.Module], cfg: object, cutoffs: list[int], symbols: int
    ) -> None:
        super().__init__()
        width, heads = cfg.decoder_embed_dim, cfg.decoder_attention_heads
        self.model = model_class(
            symbols,
            cfg.decoder_layers,
            heads,
            width,
            width // heads,
            cfg.decoder_ffn_embed_dim,
            dropout=0.0,
            dropatt=0.0,
            tie_weight=True,
            d_embed=width,
            div_val=int(cfg.adaptive_input_factor) if cutoffs else 1,
            tie_projs=[False] + [True] * len(cutoffs),
            tgt_len=cfg.tokens_per_sample,
            ext_len=0,
            mem_len=cfg.mem_len,
            cutoffs=cutoffs,
            same_length=cfg.same_length,
            clamp_len=cfg.clamp_len or -1,
        )
        # else it returns the losses of a batch in the order of the bands
        self.model.crit.keep_order = True
        # scores of the order of 1, so that losses tell of any difference: the published models
        # start with weights so small that attention hardly matters
        for name, parameter in self.model.named_parameters():
            nn.init.normal_(parameter, float("norm.weight" in name), width**-0.5)

    def losses(self, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token but the first, (B, T) of (B, T + 1), and the new memory."""
        by_time = tokens.t().contiguous()
        with boolean_masks():
            losses, *memory = self.model(by_time[:-1], by_time[1:], *memory)
        return losses.t(), memory


@torch.no_grad()
def copy_weights(original: nn.Module, decoder: SegmentDecoder) -> None:
    """Give a decoder of the plugin the weights of a published model of its size."""
    if decoder.adaptive_softmax is None:
        decoder.embed_tokens.weight.copy_(original.word_emb.emb_layers[0].weight)
        decoder.output_projection.bias.copy_(original.crit.out_layers[0].bias)
    else:
        _copy_adaptive(original.word_emb, original.crit, decoder)
    # one pair for all layers
    biases = decoder.layers[0].self_attn.biases
    biases.u.copy_(original.r_w_bias)
    biases.v.copy_(original.r_r_bias)
    for source, layer in zip(original.layers, decoder.layers, strict=True):
        attention, source_attention = layer.self_attn, source.dec_attn
        query, key, value = source_attention.qkv_net.weight.chunk(3)
        attention.q_proj.weight.copy_(query)
        attention.k_proj.weight.copy_(key)
        attention.v_proj.weight.copy_(value)
        attention.out_proj.weight.copy_(source_attention.o_net.weight)
        attention.distance_table.proj.weight.copy_(source_attention.r_net.weight)
        first, _, _, second, *_ = source.pos_ff.CoreNet
        for target, module in (
            (layer.self_attn_layer_norm, source_attention.layer_norm),
            (layer.feed_forward.fc1, first),
            (layer.feed_forward.fc2, second),
            (layer.final_layer_norm, source.pos_ff.layer_norm),
        ):
            target.weight.copy_(module.weight)
            target.bias.copy_(module.bias)


def _copy_adaptive(embedding: nn.Module, softmax: nn.Module, decoder: SegmentDecoder) -> None:
    """Copy adaptive embeddings and softmax, which share their weights in both models."""
    bands = decoder.embed_tokens.embeddings
    ends = decoder.adaptive_softmax.cutoff
    sizes = [last - first for first, last in zip([0, *ends], ends, strict=False)]
    narrower = len(embedding.emb_layers) > 1
    if narrower:
        weights = [layer.weight for layer in embedding.emb_layers]
        biases = [layer.bias for layer in softmax.out_layers]
    else:
        weights = embedding.emb_layers[0].weight.split(sizes)
        biases = softmax.out_layers[0].bias.split(sizes)
    for index, (table, projection) in enumerate(bands):
        table.weight.copy_(weights[index])
        # bands of the model's width have no projection
        if narrower:
            projection.weight.copy_(embedding.emb_projs[index])
    *projections, head, head_bias = decoder.adaptive_softmax.head
    for projection in projections:
        projection.weight.copy_(softmax.out_projs[0].t())
    # it reads the scores of the clusters from the last to the first
    head.class_proj.weight.copy_(softmax.cluster_weight.flip(0))
    head_bias.bias.copy_(torch.cat([biases[0], softmax.cluster_bias.flip(0)]))
    for tail, bias in zip(decoder.adaptive_softmax.tail, biases[1:], strict=True):
        tail[-1].bias.copy_(bias)
