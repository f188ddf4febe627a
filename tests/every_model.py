"""Tiny models of all kinds and variants, with a batch and a criterion for each."""

import functools

import torch
from fairseq.criterions import CRITERION_REGISTRY

from tests import tiny
from tests.product_key_memory.tiny import MEMORY, tiny_language_model, tiny_transformer
from tests.weighted_transformer.tiny import sentences, tiny_weighted_transformer

SPARSE = {"memory_layers": "2", "memory_optimizer": "adam_with_memory", **MEMORY}
SPANS = {"adaptive_span": True, "span_ramp": 2, "attention_span": 6}
LOCKED = {"locked_dropout": True, "word_dropout": 0.1, "dropout": 0.1, "attention_dropout": 0.1}
SWITCHES = ("query_batch_norm", "output_gate")
TRANSLATION_MEMORIES = {
    "encoder_memory_layers": "1",
    "decoder_memory_layers": "2",
    "memory_query_batch_norm": True,
    "optimizer": "adam_with_memory",
}
SEGMENT_LOSSES = {"half_loss": {"half_loss": True}, "span_loss": {"span_loss": 0.01}}
TEXT, PAIRS = "cross_entropy", "label_smoothed_cross_entropy"


def case(build, criterion, **options):
    """Return a function that builds a model, and the name of its criterion."""
    return functools.partial(build, **options), criterion


CASES = {
    "transformer_xl": case(tiny.tiny_transformer_xl, TEXT),
    "half loss": case(tiny.tiny_transformer_xl, "half_loss"),
    "shaw": case(tiny.tiny_transformer_xl, TEXT, positions="shaw"),
    "recomputed": case(tiny.tiny_transformer_xl, TEXT, checkpoint_activations=True),
    "locked dropout": case(tiny.tiny_transformer_xl, TEXT, **LOCKED),
    "recurrent memory table": case(tiny.tiny_transformer_xl, TEXT, **SPARSE),
    "spans": case(tiny.tiny_model, "span_loss", **SPANS),
    "spans with epsilon": case(tiny.tiny_model, "span_loss", **SPANS, span_epsilon=1e-8),
    **{
        variant: case(tiny.tiny_model, TEXT, persistent_variant=variant)
        for variant in (*tiny.VARIANTS, "ff-attn")
    },
    "memory": case(tiny_language_model, TEXT, **SPARSE),
    "memory, all options": case(
        tiny_language_model, TEXT, **SPARSE, **{f"memory_{name}": True for name in SWITCHES}
    ),
    "flat keys": case(tiny_language_model, TEXT, **SPARSE, memory_keys="flat"),
    "memories that share their values": case(
        tiny_language_model, TEXT, **SPARSE | {"memory_layers": "1,3"}, memory_share_values=True
    ),
    "memories of a translation model": case(tiny_transformer, PAIRS, **TRANSLATION_MEMORIES),
    **{
        f"branches, {name}": case(tiny_weighted_transformer, PAIRS, **options)
        for name, options in {
            "shake": {"branch_training": "shake"},
            "softmax": {"branch_parameterization": "softmax"},
            "top-k": {"branch_top_k": 2},
            "as-written": {"branch_residual": "as-written"},
            "both attentions": {"branch_decoder_attention": "both"},
        }.items()
    },
}


def build_criterion(name):
    """Build a fairseq criterion by its name, or segment_loss with one of its options."""
    if name in SEGMENT_LOSSES:
        return tiny.segment_loss(**SEGMENT_LOSSES[name])
    kind, task = CRITERION_REGISTRY[name], tiny.tiny_task()
    if name == "label_smoothed_cross_entropy":
        return kind(task, sentence_avg=False, label_smoothing=0.1)
    return kind(task, sentence_avg=False)


def make_batch(model, device):
    """Build a fairseq batch on a device: text, or sentence pairs for models with an encoder."""
    if hasattr(model, "encoder"):
        net_input, target = sentences(), tiny.tokens(2, 5)
    else:
        net_input, target = {"src_tokens": tiny.tokens(2, 8)}, tiny.tokens(2, 8)
        net_input["src_lengths"] = torch.full((2,), 8)
    net_input = {name: value.to(device) for name, value in net_input.items()}
    sample = {"net_input": net_input, "target": target.to(device), "ntokens": target.numel()}
    return {**sample, "nsentences": 2, "id": torch.arange(2, device=device)}
