"""Import published code from the user's checkouts; this package contains none of it.

Shapes: B streams, T tokens of a segment, M remembered tokens, N tokens, H heads, k slots read by a
head, d model width.
"""

import argparse
import contextlib
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary
from torch import Tensor, nn

from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.modules import ProductKeyMemory
from fairseq_plugins.transformer_xl.model import TransformerXLConfig
from scripts.convert import ADAPTIVE_SPAN, TRANSFORMER_XL
from scripts.convert._models import convert_model
from scripts.convert._options import ForeignConfig, ForeignVocabulary


class Checkout(NamedTuple):
    """Where a published model's class is: its module, and the folders that it imports from."""

    url: str
    module: str
    name: str
    import_folders: tuple[str, ...] = ("",)

    def find(self, path: Path) -> list[str]:
        """Return the folders to import from in a checkout; [] if it is of other code."""
        folders = [path.resolve() / folder for folder in self.import_folders]
        file = self.module.replace(".", "/") + ".py"
        return [*map(str, folders)] if (folders[0] / file).is_file() else []


CHECKOUTS = {
    "transformer_xl": Checkout(
        "https://github.com/kimiyoung/transformer-xl",
        "mem_transformer",
        "MemTransformerLM",
        ("pytorch", "pytorch/utils"),
    ),
    "all_attention": Checkout(
        "https://github.com/facebookresearch/adaptive-span", "models", "TransformerSeq"
    ),
    "product_key_memory": Checkout(
        "https://github.com/facebookresearch/XLM", "xlm.model.memory.memory", "HashingMemory"
    ),
}
URLS = ", ".join(checkout.url for checkout in CHECKOUTS.values())


def import_published(paths: Sequence[Path]) -> dict[str, type[nn.Module]]:
    """Import the models' classes from checkouts of published code; return them by paper."""
    classes = {}
    for path in paths:
        for paper, checkout in CHECKOUTS.items():
            if folders := checkout.find(path):
                classes[paper] = _import(checkout, path, folders)
                break
        else:
            raise ValueError(f"--original is {path}: give checkouts of {URLS}")
    return classes


def _import(checkout: Checkout, path: Path, folders: list[str]) -> type[nn.Module]:
    known = set(sys.modules)
    with (
        mock.patch.object(sys, "path", folders + sys.path),
        # Transformer-XL's code parses the version's two numbers, which it does not need
        mock.patch.object(torch.version, "cuda", torch.version.cuda or "0.0"),
        # the memory's code prints that faiss is missing, which it does not need
        contextlib.redirect_stderr(io.StringIO()),
    ):
        try:
            return getattr(importlib.import_module(checkout.module), checkout.name)
        except Exception as error:
            raise ValueError(
                f"--original is {path}, whose {checkout.module} cannot be imported or has no "
                f"{checkout.name} ({type(error).__name__}: {error}): give an unchanged checkout"
            ) from error
        finally:
            # other code may use module names such as models and utils
            for name in set(sys.modules) - known:
                file = getattr(sys.modules[name], "__file__", None) or folders[0]
                if any(Path(file).is_relative_to(folder) for folder in folders):
                    del sys.modules[name]


def translate(model: nn.Module, options: dict[str, Any], dictionary: Dictionary) -> dict:
    """Convert a published model's weights to ours, as scripts.convert.checkpoint does.

    The published model has the symbols of the dictionary except <s> and <pad>.
    """
    source = ADAPTIVE_SPAN if "attn_span" in options else TRANSFORMER_XL
    symbols = ["<eos>", *dictionary.symbols[dictionary.unk() :]]
    with tempfile.TemporaryDirectory() as folder:
        config, vocabulary = Path(folder) / "config.json", Path(folder) / "vocab.txt"
        config.write_text(json.dumps(options), encoding="utf-8")
        vocabulary.write_text("\n".join(symbols), encoding="utf-8")
        files = ForeignConfig(config), ForeignVocabulary(vocabulary)
        return convert_model(*files, source, model.state_dict())[2]


def draw_weights(model: nn.Module) -> None:
    """Draw weights that make scores of the order of 1, so that different models differ in loss.

    The published models start with tiny weights, so that attention hardly matters, or with none.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "current_val" not in name:
            nn.init.normal_(parameter, std=parameter.size(-1) ** -0.5)
        elif "norm" in name:
            nn.init.normal_(parameter, float(name.endswith("weight")), len(parameter) ** -0.5)


class PublishedTransformerXL(nn.Module):
    """The published Transformer-XL, without dropout, for batches of fairseq's shape.

    It was written for the PyTorch of 2019: Boolean masks replace its masks of bytes.
    """

    def __init__(
        self, model_class: type[nn.Module], cfg: TransformerXLConfig, symbols: int
    ) -> None:
        super().__init__()
        self.options = {
            "n_token": symbols,
            "n_layer": cfg.decoder_layers,
            "n_head": cfg.decoder_attention_heads,
            "d_model": cfg.decoder_embed_dim,
            "d_head": cfg.decoder_embed_dim // cfg.decoder_attention_heads,
            "d_inner": cfg.decoder_ffn_embed_dim,
            "dropout": 0.0,
            "dropatt": 0.0,
            "pre_lnorm": False,
            "tgt_len": cfg.tokens_per_sample,
            "ext_len": 0,
            "mem_len": cfg.mem_len,
            "same_length": cfg.same_length,
            "clamp_len": cfg.clamp_len or -1,
            "cutoffs": [],
        }
        tied = {"d_embed": cfg.decoder_embed_dim, "tie_weight": True, "tie_projs": [False]}
        self.model = model_class(**self.options, **tied)
        # otherwise it returns the losses of a batch in the order of the bands
        self.model.crit.keep_order = True
        draw_weights(self.model)
        nn.init.zeros_(self.model.crit.out_layers[0].bias)

    def remember(self, past: Tensor) -> None:
        """Start as if ``past`` (B, M, d) had been the input of each layer."""
        self.memory = [past.transpose(0, 1)] * (len(self.model.layers) + 1)

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the loss of each token but the first, (B, T) of (B, T + 1)."""
        # the published model lacks <s> and <pad>
        by_time = (tokens - 2).t().contiguous()
        # PyTorch no longer accepts masks of bytes
        with mock.patch.object(Tensor, "byte", Tensor.bool):
            losses, *self.memory = self.model(by_time[:-1], by_time[1:], *self.memory)
        return losses.t()


class PublishedAllAttention(nn.Module):
    """The published all-attention model, without dropout, for batches of fairseq's shape.

    Args:
        spans: the span of every head as a fraction of the largest.
    """

    def __init__(
        self, model_class: type[nn.Module], cfg: AllAttentionConfig, symbols: int, spans: float
    ) -> None:
        super().__init__()
        self.options = {
            "vocab_size": symbols,
            "nb_layers": cfg.decoder_layers,
            "nb_heads": cfg.decoder_attention_heads,
            "hidden_size": cfg.decoder_embed_dim,
            "inner_hidden_size": cfg.decoder_ffn_embed_dim,
            "attn_span": cfg.attention_span,
            "dropout": 0.0,
            "emb_dropout": 0.0,
            "adapt_io_params": {"adapt_io_enabled": False},
            "adapt_span_params": {
                "adapt_span_enabled": True,
                "adapt_span_loss": 0.0,
                "adapt_span_ramp": cfg.span_ramp,
                "adapt_span_init": 0.0,
                # as in the published runs: the memory shrinks with the spans
                "adapt_span_cache": True,
            },
            "pers_mem_params": {"pers_mem_size": cfg.persistent_vectors},
        }
        self.model = model_class(**self.options)
        draw_weights(self.model)
        for name, parameter in self.model.named_parameters():
            if name.endswith("current_val"):
                nn.init.constant_(parameter, spans)

    def remember(self, past: Tensor) -> None:
        """Start as if ``past`` (B, M, d) had been the input of each layer; no head sees more."""
        self.memory = []
        for layer in self.model.layers:
            size = layer.attn.attn.get_cache_size()
            # it keeps more tokens than it sees; their weights are 0, so their states do not matter
            self.memory.append(F.pad(past[:, -size:], (0, 0, max(0, size - past.size(1)), 0)))

    def losses(self, tokens: Tensor) -> Tensor:
        """Return the loss of each token but the first, (B, T) of (B, T + 1)."""
        # the published model lacks <s> and <pad>
        inputs, targets = tokens[:, :-1] - 2, tokens[:, 1:] - 2
        scores, self.memory, _ = self.model(inputs, self.memory)
        losses = F.nll_loss(scores.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view_as(targets)


class PublishedMemory(nn.Module):
    """The published memory (``--mem_implementation pq_fast``) with the weights of ours.

    Args:
        memory: our memory; its values are shared, not copied, which saves gigabytes.
        sparse: whether the values get a sparse gradient (``--mem_sparse``).
    """

    def __init__(
        self, memory_class: type[nn.Module], memory: ProductKeyMemory, sparse: bool
    ) -> None:
        super().__init__()
        (linear,) = memory.query.layers
        heads, _, keys, half = memory.keys.subkeys.shape
        parser = argparse.ArgumentParser()
        memory_class.register_args(parser)
        params = parser.parse_args(
            f"--mem_sparse {sparse} --mem_heads {heads} --mem_knn {memory.knn} "
            f"--mem_n_keys {keys} --mem_k_dim {2 * half}".split()
        )
        memory_class.check_params(params)
        # otherwise inference copies its reads to the CPU, for statistics
        memory_class.EVAL_MEMORY = False
        self.memory = memory_class.build(linear.in_features, memory.values.weight.size(1), params)
        self.memory.to(linear.weight)
        with torch.no_grad():
            self.memory.keys.copy_(memory.keys.subkeys)
        self.memory.query_proj.query_mlps[0].load_state_dict(linear.state_dict())
        self.values = self.memory.values
        self.values.weight = nn.Parameter(memory.values.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (N, d) to (N, d)."""
        return self.memory(x)
