"""fairseq's transformers with product-key memories: language models and translation.

Lample et al. 2019 (arXiv:1907.05242). Presets take layers, heads, widths, learned positions and
sizes of memories from sections 4.3 and 4.5. The paper does not give the rest, so it is our choice:
feed-forward sublayers four times as wide as the model; norms after each sublayer, GELU and dropouts
of 0.1 as in BERT, which the paper compares with; tied embeddings; width 1024 for the ablations.
"""

import argparse
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.models import register_model
from fairseq.models.transformer import TransformerModel
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from fairseq.tasks import FairseqTask
from omegaconf import II, DictConfig

from fairseq_plugins.fairseq_integration.dictionaries import attach_digest
from fairseq_plugins.fairseq_integration.options import option
from fairseq_plugins.fairseq_integration.presets import register_presets
from fairseq_plugins.fairseq_integration.transformer_options import (
    BuiltOnTransformer,
    TransformerOptions,
    options_from,
    parsed,
)
from fairseq_plugins.product_key_memory.fairseq_layers import put_memories
from fairseq_plugins.product_key_memory.options import (
    MemoryLayersOptions,
    MemoryOptions,
    warn_without_memories,
)

_LEARNED_POSITIONS = "learn a vector for each position; --no-decoder-learned-pos for sinusoids"


@dataclass
class MemoryLanguageModelConfig(MemoryLayersOptions, TransformerLanguageModelConfig):
    """Options of ``pkm_transformer_lm``: those of fairseq's ``transformer_lm``, and memories'."""

    decoder_learned_pos: bool = option(True, _LEARNED_POSITIONS)
    decoder_input_dim: Optional[int] = option(
        None, "width of the input embeddings (default: the model's)"
    )
    decoder_output_dim: Optional[int] = option(
        None, "width of the output embeddings (default: the model's)"
    )
    # only fairseq's language_modeling has these options
    add_bos_token: bool = II("oc.select:task.add_bos_token,false")
    max_target_positions: Optional[int] = II("oc.select:task.max_target_positions,null")


@register_model("pkm_transformer_lm", dataclass=MemoryLanguageModelConfig)
class MemoryLanguageModel(TransformerLanguageModel):
    """fairseq's transformer language model with memories in some layers (section 4)."""

    # the parent's downloads are other models
    hub_models = BuiltOnTransformer.hub_models

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        """Add the options to ``parser``."""
        # fairseq would let "--decoder-learned-pos" switch learned positions off
        parser.add_argument(
            "--decoder-learned-pos", action=argparse.BooleanOptionalAction, help=_LEARNED_POSITIONS
        )
        super().add_args(parser)

    @classmethod
    def build_model(
        cls, cfg: MemoryLanguageModelConfig, task: FairseqTask
    ) -> "MemoryLanguageModel":
        """Build the model for the task's dictionary."""
        if getattr(task, "reads_streams", False):
            raise ValueError(
                "--arch pkm_transformer_lm reads blocks of text that have no past, and --task "
                "segment_language_modeling streams: give --task language_modeling, or --arch "
                "transformer_xl, which takes --memory-layers too"
            )
        for width in ("decoder_input_dim", "decoder_output_dim"):
            if getattr(cfg, width) is None:
                setattr(cfg, width, cfg.decoder_embed_dim)
        model = super().build_model(cfg, task)
        put_memories(model.decoder, cfg)
        if not cfg.memory_layers:
            warn_without_memories(cfg, "memory_layers")
        attach_digest(model, task)
        return model

    def prepare_for_inference_(self, cfg: DictConfig) -> None:
        """Prepare to score or generate; refuse blocks that are longer than the positions.

        fairseq would skip longer blocks and report a figure for the rest.
        """
        super().prepare_for_inference_(cfg)
        length = getattr(cfg.task, "tokens_per_sample", None) or 0
        if length > self.max_positions():
            raise ValueError(
                f"--tokens-per-sample is {length}: the model has positions for blocks of up to "
                f"{self.max_positions()} tokens, give no more"
            )


@dataclass
class MemoryTransformerOptions(MemoryOptions):
    """Options of ``pkm_transformer`` that fairseq's ``transformer`` does not have."""

    encoder_memory_layers: Optional[str] = option(
        None,
        "encoder layers that have a product-key memory, counted from 1, such as 3,6 (default: "
        "none); use it with --optimizer adam_with_memory",
    )
    decoder_memory_layers: Optional[str] = option(
        None, "decoder layers that have a product-key memory (default: none)"
    )


@dataclass
class MemoryTransformerConfig(MemoryTransformerOptions, TransformerOptions):
    """Options of ``pkm_transformer``: those of fairseq's ``transformer``, and the memories'."""


@register_model("pkm_transformer", dataclass=MemoryTransformerConfig)
class MemoryTransformer(BuiltOnTransformer, TransformerModel):
    """fairseq's translation transformer with memories in some layers."""

    added_options = MemoryTransformerOptions

    @classmethod
    def build_model(
        cls, cfg: MemoryTransformerConfig | argparse.Namespace, task: FairseqTask
    ) -> "MemoryTransformer":
        """Build the model for the task's dictionaries."""
        args = parsed(cfg)
        options = options_from(MemoryTransformerOptions, args)
        if not hasattr(args, "memory_optimizer"):
            options.memory_optimizer = getattr(args, "optimizer", None)
        model, values = super().build_model(args, task), None
        for part in ("encoder", "decoder"):
            values = put_memories(getattr(model, part), options, f"{part}_memory_layers", values)
        if not options.encoder_memory_layers and not options.decoder_memory_layers:
            warn_without_memories(options, "encoder_memory_layers")
        attach_digest(model, task)
        return model


def _language_model(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "decoder_layers": layers,
        "decoder_embed_dim": width,
        "decoder_ffn_embed_dim": 4 * width,
        "decoder_attention_heads": heads,
        "decoder_learned_pos": True,
        "share_decoder_input_output_embed": True,
        # as in BERT
        "decoder_normalize_before": False,
        "activation_fn": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
    }


# seconds on a CPU
_TINY_MEMORY: dict[str, Any] = {
    "memory_slots": 1024,
    "memory_heads": 4,
    "memory_knn": 8,
    "memory_query_dim": 64,
}

LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    **{
        f"pkm_transformer_lm_{layers}l_{width}d": _language_model(layers, width, 16)
        for layers in (12, 16, 24)
        for width in (1024, 1600)
    },
    "pkm_transformer_lm_ablation": {
        **_language_model(6, 1024, 8),
        "memory_layers": "5",
        "memory_slots": 512**2,
        "memory_heads": 4,
        "memory_knn": 32,
    },
    "pkm_transformer_lm_tiny": {**_language_model(4, 128, 4), "memory_layers": "3", **_TINY_MEMORY},
}

TRANSLATION_MODELS: dict[str, dict[str, Any]] = {
    "pkm_transformer_tiny": {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_embed_dim": 128,
        "encoder_ffn_embed_dim": 512,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_memory_layers": "2",
        "decoder_memory_layers": "1",
        **_TINY_MEMORY,
    }
}

register_presets("pkm_transformer_lm", LANGUAGE_MODELS)
register_presets("pkm_transformer", TRANSLATION_MODELS)
