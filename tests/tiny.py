"""Tiny models, text and dictionaries for tests."""

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_plugins.all_attention.model import AllAttentionConfig, AllAttentionLanguageModel
from fairseq_plugins.segment_language_model.loss import SegmentLoss, SegmentLossConfig
from fairseq_plugins.segment_language_model.stream_pasts import EnsemblePasts
from fairseq_plugins.transformer_xl.model import TransformerXLConfig, TransformerXLLanguageModel

VOCABULARY = 20
_SPECIAL = 4
SIZES = {"decoder_layers": 3, "decoder_embed_dim": 16, "decoder_attention_heads": 2}
# values that fairseq takes from the task's options
SEGMENTS = {"tokens_per_sample": 8, "extended_context": 0}
VARIANTS = ["all", "attn-split", "head-split", "single-head"]
# embeddings in three bands, tied to the adaptive softmax
ADAPTIVE = {
    "adaptive_input": True,
    "adaptive_input_cutoff": "8,14",
    "adaptive_softmax_cutoff": "8,14",
    "adaptive_input_factor": 2,
    "adaptive_softmax_factor": 2,
    "tie_adaptive_weights": True,
    "tie_adaptive_proj": True,
}


def dictionary() -> Dictionary:
    """Return a dictionary of 20 symbols: <s> <pad> </s> <unk> and sixteen letters."""
    made = Dictionary()
    for letter in "abcdefghijklmnop":
        made.add_symbol(letter)
    return made


def tiny_task(**more) -> SimpleNamespace:
    """Return a stand-in for a task, with the attributes that models and criteria use."""
    return SimpleNamespace(source_dictionary=dictionary(), target_dictionary=dictionary(), **more)


class StreamTask(SimpleNamespace):
    """A stand-in for the task of segment models."""

    reads_streams = True


def stream_task(**more) -> StreamTask:
    """Return a stand-in for a task whose batches carry the pasts of streams."""
    return StreamTask(source_dictionary=dictionary(), target_dictionary=dictionary(), **more)


def segment_loss(task=None, **options) -> SegmentLoss:
    """Build the loss of segment models with these options, averaged over tokens."""
    cfg = SegmentLossConfig(**{"sentence_avg": False, **options})
    return SegmentLoss.build_criterion(cfg, task or stream_task())


def tiny_model(seed: int = 1, **options) -> AllAttentionLanguageModel:
    """Build an all-attention model of 3 layers, d 16, 2 heads, N 5, span 6, without dropout."""
    values = {**SIZES, "persistent_vectors": 5, "attention_span": 6, **SEGMENTS, **options}
    torch.manual_seed(seed)
    return AllAttentionLanguageModel.build_model(AllAttentionConfig(**values), stream_task())


def tiny_transformer_xl(seed: int = 1, **options) -> TransformerXLLanguageModel:
    """Build a Transformer-XL of 3 layers, d 16, 2 heads, f 24, recurrence 8, without dropout."""
    values = {**SIZES, "decoder_ffn_embed_dim": 24, "init_std": 0.2, **SEGMENTS, **options}
    torch.manual_seed(seed)
    return TransformerXLLanguageModel.build_model(TransformerXLConfig(**values), stream_task())


def translation_model(kind, arch, seed=1, task_cfg=None, **options):
    """Build a model of 2 + 2 layers, d 16, f 24, 4 heads, without dropout.

    fairseq's function for ``arch`` completes the options.
    """
    sizes = {"share_all_embeddings": True, "dropout": 0.0, "attention_dropout": 0.0, "tpu": False}
    for part in ("encoder", "decoder"):
        sizes |= {f"{part}_layers": 2, f"{part}_attention_heads": 4}
    sizes |= {"encoder_embed_dim": 16, "encoder_ffn_embed_dim": 24}
    sizes |= {"max_source_positions": 64, "max_target_positions": 64}
    args = Namespace(**{**sizes, **options})
    ARCH_CONFIG_REGISTRY[arch](args)
    torch.manual_seed(seed)
    return kind.build_model(args, tiny_task(cfg=task_cfg))


def tokens(streams: int, length: int, seed: int = 2) -> torch.Tensor:
    """Return random letters, (streams, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(_SPECIAL, VOCABULARY, (streams, length), generator=generator)


def text(length: int) -> np.ndarray:
    """Return letters that follow from the letter before: 4 5 6 … 19 4 5 …"""
    return np.array([4 + i % 16 for i in range(length)], dtype=np.uint16)


def scores_by_segment(model, stream, length, mode=torch.no_grad, pasts=None) -> torch.Tensor:
    """Return scores (B, T, V) of streams (B, T) in segments of ``length``, from empty ``pasts`` on.

    Without gradients, the model is in evaluation mode, in which layers keep keys and values.
    """
    pasts, training = pasts or EnsemblePasts(), model.training
    parts = []
    model.train(training and mode is not torch.no_grad)
    with mode():
        for start in range(0, stream.size(1), length):
            segment = stream[:, start : start + length]
            parts.append(model(segment, pasts=pasts, start=start)[0])
    model.train(training)
    return torch.cat(parts, dim=1)


def spread_spans(model: AllAttentionLanguageModel, seed: int = 3) -> None:
    """Give each head of a model a span of its own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for span in model.learned_spans():
            span.value.copy_(torch.rand(span.value.shape, generator=generator))
