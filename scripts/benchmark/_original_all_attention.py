"""The published all-attention code, imported from a checkout of the user's, to compare with.

None of that code is here: its licence is not this project's. It runs on today's PyTorch as it is.

Shapes: H heads, B streams, T tokens of a segment, M remembered tokens, d model width.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.segment_language_model.decoder import SegmentDecoder
from scripts.benchmark._original_checkout import Checkout

CHECKOUT = Checkout("https://github.com/facebookresearch/adaptive-span", "models", "TransformerSeq")


def import_original(path: Path) -> type[nn.Module]:
    """The model's class in a checkout.

    Raises ValueError when it cannot be imported.
    """
    return CHECKOUT.import_class(path)


class OriginalModel(nn.Module):
    """The published model with its memory, over batches as fairseq has them.

    Its memory shrinks with the spans (``--adapt-span-cache``), as in the published runs.

    Args:
        model_class: what :func:`import_original` returns.
        cfg: options without dropout, with adaptive spans and persistent vectors.
        span_values: each head's span as a part of the largest, (layers, H).
        symbols: V.
    """

    def __init__(
        self,
        model_class: type[nn.Module],
        cfg: AllAttentionConfig,
        span_values: Tensor,
        symbols: int,
    ) -> None:
        super().__init__()
        self.model = model_class(
            vocab_size=symbols,
            hidden_size=cfg.decoder_embed_dim,
            nb_heads=cfg.decoder_attention_heads,
            nb_layers=cfg.decoder_layers,
            attn_span=cfg.attention_span,
            dropout=0.0,
            emb_dropout=0.0,
            adapt_io_params={"adapt_io_enabled": False},
            adapt_span_params={
                "adapt_span_enabled": True,
                "adapt_span_loss": 0.0,
                "adapt_span_ramp": cfg.span_ramp,
                "adapt_span_init": 0.0,
                "adapt_span_cache": True,
            },
            pers_mem_params={"pers_mem_size": cfg.persistent_vectors},
        )
        with torch.no_grad():
            for layer, values in zip(self.model.layers, span_values, strict=True):
                layer.attn.attn.adaptive_span._mask.current_val.copy_(values.view(-1, 1, 1))
        # scores of the order of 1, so that losses tell of any difference: with the weights that it
        # starts with, attention is almost even
        for module in self.model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, module.weight.numel() ** -0.5)
                nn.init.normal_(module.bias, std=module.bias.numel() ** -0.5)

    def memory_of(self, past: Tensor) -> list[Tensor]:
        """Memory as if (B, M, d) had entered each of the layers, of which no head sees more."""
        memory = []
        for layer in self.model.layers:
            kept = layer.attn.attn.get_cache_size()
            # it keeps some tokens more than it sees, whose weights are 0: they may be anything
            memory.append(F.pad(past[:, -kept:], (0, 0, max(0, kept - past.size(1)), 0)))
        return memory

    def losses(self, tokens: Tensor, memory: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token but the first, (B, T) of (B, T + 1), and the new memory."""
        read, targets = tokens[:, :-1], tokens[:, 1:]
        scores, memory, _ = self.model(read, memory)
        losses = F.nll_loss(scores.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets), memory


@torch.no_grad()
def copy_weights(original: nn.Module, decoder: SegmentDecoder) -> None:
    """Give a decoder of the plugin the weights, not the spans, of a published model of its size."""
    decoder.embed_tokens.weight.copy_(original.in_emb.weight)
    decoder.output_projection.weight.copy_(original.out_emb.weight)
    decoder.output_projection.bias.copy_(original.out_emb.bias)
    # (1, d_h, span), the farthest first -> (span, d_h), the nearest first
    decoder.positions.weight.copy_(original.key_pe[0].t().flip(0))
    for source, layer in zip(original.layers, decoder.layers, strict=True):
        attention, heads = layer.self_attn, source.attn.attn
        attention.q_proj.weight.copy_(source.attn.proj_query.weight)
        attention.k_proj.weight.copy_(source.attn.proj_key.weight)
        attention.v_proj.weight.copy_(source.attn.proj_val.weight)
        attention.out_proj.weight.copy_(source.attn.proj_out.weight)
        attention.persistent.keys.copy_(heads.persistent_memory.key.transpose(1, 2))
        attention.persistent.values.copy_(heads.persistent_memory.val)
        layer.self_attn_layer_norm.weight.copy_(source.norm1.weight)
        layer.self_attn_layer_norm.bias.copy_(source.norm1.bias)
