"""Published code in a checkout of the user's, to compare with.

None of that code is here: its licences are not this project's.

Shapes: H heads, B streams, T tokens of a segment, M remembered tokens, V symbols, N tokens, k slots
read by a head, d model width.
"""

import argparse
import contextlib
import importlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.product_key_memory.memory import ProductKeyMemory
from fairseq_plugins.segment_language_model.decoder import SegmentDecoder
from fairseq_plugins.transformer_xl.model import TransformerXLConfig


@dataclass(frozen=True)
class Checkout:
    """Where a published model's class is.

    Args:
        url: of the repository.
        module: the class's module, which lies at the root or in the folder.
        name: of the class.
        folder: of the repository; None where the module lies at the root.
        places: folders beside the module that it imports from.
    """

    url: str
    module: str
    name: str
    folder: str | None = None
    places: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """The module's file."""
        return self.module.replace(".", "/") + ".py"

    def find(self, path: Path) -> Path:
        """Folder of the module in a checkout, given that folder or the root.

        Raises ValueError when there is none.
        """
        for folder in (path, path / self.folder) if self.folder else (path,):
            if (folder / self.file).is_file():
                return folder.resolve()
        lack = f"neither it nor its folder {self.folder} has" if self.folder else "it has no"
        raise ValueError(
            f"--original is {path}, and {lack} {self.file}: give the folder of a checkout of "
            f"the published code, {self.url}"
        )

    def import_class(self, path: Path) -> type[nn.Module]:
        """The model's class in a checkout.

        Raises ValueError when it cannot be imported.
        """
        folder = self.find(path)
        places = [str(folder), *(str(folder / place) for place in self.places)]
        known = set(sys.modules)
        with (
            mock.patch.object(sys, "path", places + sys.path),
            # Transformer-XL's reads the version's two numbers, and makes no use of them
            mock.patch.object(torch.version, "cuda", torch.version.cuda or "0.0"),
            # the memory's says there that faiss is missing, and makes no use of it
            contextlib.redirect_stderr(io.StringIO()),
        ):
            try:
                return getattr(importlib.import_module(self.module), self.name)
            except Exception as error:
                raise ValueError(
                    f"--original is {path}, whose {self.file} cannot be imported or has no "
                    f"{self.name} ({type(error).__name__}: {error}): give an unchanged checkout"
                ) from error
            finally:
                # names such as models and utils are left to others
                for name in [name for name in set(sys.modules) - known if _lies_in(name, folder)]:
                    del sys.modules[name]


def _lies_in(name: str, folder: Path) -> bool:
    """Whether an imported module, or a package, which may have no file, is of a folder."""
    module = sys.modules[name]
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    return any(place and Path(place).is_relative_to(folder) for place in places)


TRANSFORMER_XL = Checkout(
    "https://github.com/kimiyoung/transformer-xl",
    "mem_transformer",
    "MemTransformerLM",
    folder="pytorch",
    places=("utils",),
)
ALL_ATTENTION = Checkout(
    "https://github.com/facebookresearch/adaptive-span", "models", "TransformerSeq"
)
MEMORY = Checkout(
    "https://github.com/facebookresearch/XLM", "xlm.model.memory.memory", "HashingMemory"
)


class OriginalTransformerXL(nn.Module):
    """The published Transformer-XL over batches as fairseq has them.

    It was written for the PyTorch of 2019: masks of booleans take the place of bytes, and weights
    are drawn here, which it leaves empty.

    Args:
        model_class: of a checkout.
        cfg: options without dropout.
        cutoffs: where the bands of the adaptive embeddings end; [] for plain ones.
        symbols: V.
    """

    def __init__(
        self,
        model_class: type[nn.Module],
        cfg: TransformerXLConfig,
        cutoffs: list[int],
        symbols: int,
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

    def losses(self, tokens: Tensor, memory: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Return the loss of each token but the first, (B, T) of (B, T + 1), and the new memory."""
        by_time = tokens.t().contiguous()
        # PyTorch takes masks of bytes no longer
        with mock.patch.object(Tensor, "byte", Tensor.bool):
            losses, *memory = self.model(by_time[:-1], by_time[1:], *(memory or []))
        return losses.t(), memory


@torch.no_grad()
def copy_transformer_xl(original: nn.Module, decoder: SegmentDecoder) -> None:
    """Give a decoder of this package the weights of a published Transformer-XL of its size."""
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
            target.load_state_dict(module.state_dict())


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


class OriginalAllAttention(nn.Module):
    """The published all-attention model over batches as fairseq has them.

    Its memory shrinks with the spans (``--adapt-span-cache``), as in the published runs.

    Args:
        model_class: of a checkout.
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
def copy_all_attention(original: nn.Module, decoder: SegmentDecoder) -> None:
    """Give a decoder of this package the weights, not the spans, of a published all-attention."""
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
        layer.self_attn_layer_norm.load_state_dict(source.norm1.state_dict())


class OriginalMemory(nn.Module):
    """The published memory (``--mem_implementation pq_fast``) with the weights of ours.

    Args:
        memory_class: of a checkout.
        memory: ours; the values stay its own, which saves gigabytes.
        sparse: whether the values get a sparse gradient (``--mem_sparse``).
    """

    def __init__(
        self, memory_class: type[nn.Module], memory: ProductKeyMemory, sparse: bool
    ) -> None:
        super().__init__()
        (linear,) = memory.query_network.layers
        heads, _, keys, half = memory.keys.subkeys.shape
        parser = argparse.ArgumentParser()
        memory_class.register_args(parser)
        params = parser.parse_args(
            f"--mem_sparse {sparse} --mem_heads {heads} --mem_knn {memory.knn} "
            f"--mem_n_keys {keys} --mem_k_dim {2 * half}".split()
        )
        memory_class.check_params(params)
        # else inference copies what it has read to the CPU, for statistics
        memory_class.EVAL_MEMORY = False
        self.memory = memory_class.build(linear.in_features, memory.values.size(1), params)
        self.memory.to(linear.weight)
        with torch.no_grad():
            self.memory.keys.copy_(memory.keys.subkeys)
        self.query_network.query_mlps[0].load_state_dict(linear.state_dict())
        self.values.weight = nn.Parameter(memory.values.detach())
        self.knn = memory.knn

    @property
    def query_network(self) -> nn.Module:
        """From tokens (N, d) to queries (N·H, d_q)."""
        return self.memory.query_proj

    @property
    def values(self) -> nn.EmbeddingBag:
        """The table of values."""
        return self.memory.values

    def keys(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores and slots (N, H, k) that fit queries (N·H, d_q) best."""
        scores, slots = self.memory.get_indices(queries, k)
        shape = (-1, self.memory.heads, k)
        return scores.view(shape), slots.view(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (N, d) to (N, d)."""
        return self.memory(x)
