"""Models of all kinds and variants that fit a test, and a batch and a criterion for each."""

import torch
from fairseq.criterions import CRITERION_REGISTRY

from tests import tiny
from tests.product_key_memory.tiny import MEMORY, tiny_language_model, tiny_transformer
from tests.weighted_transformer.tiny import sentences, tiny_weighted_transformer

SPARSE = {"memory_layers": "2", "memory_optimizer": "adam_with_memory", **MEMORY}
SPANS = {"adaptive_span": True, "span_ramp": 2, "attention_span": 6}
TRANSLATION_MEMORIES = {
    "encoder_memory_layers": "1",
    "decoder_memory_layers": "2",
    "memory_query_batch_norm": True,
    "optimizer": "adam_with_memory",
}
SEGMENT_LOSSES = {"half_loss": {"half_loss": True}, "span_loss": {"span_loss": 0.01}}
# what builds each, and the criterion of its training
CASES = {
    "transformer_xl": (lambda: tiny.tiny_transformer_xl(), "cross_entropy"),
    "half loss": (lambda: tiny.tiny_transformer_xl(), "half_loss"),
    "shaw": (lambda: tiny.tiny_transformer_xl(positions="shaw"), "cross_entropy"),
    "recomputed": (
        lambda: tiny.tiny_transformer_xl(checkpoint_activations=True),
        "cross_entropy",
    ),
    "locked dropout": (
        lambda: tiny.tiny_transformer_xl(
            locked_dropout=True, word_dropout=0.1, dropout=0.1, attention_dropout=0.1
        ),
        "cross_entropy",
    ),
    "recurrent memory table": (
        lambda: tiny.tiny_transformer_xl(**SPARSE),
        "cross_entropy",
    ),
    "spans": (lambda: tiny.tiny_model(**SPANS), "span_loss"),
    "spans with epsilon": (
        lambda: tiny.tiny_model(**SPANS, span_epsilon=1e-8),
        "span_loss",
    ),
    **{
        variant: (
            lambda variant=variant: tiny.tiny_model(persistent_variant=variant),
            "cross_entropy",
        )
        for variant in (*tiny.VARIANTS, "ff-attn")
    },
    "memory": (lambda: tiny_language_model(**SPARSE), "cross_entropy"),
    "memory, all options": (
        lambda: tiny_language_model(
            **SPARSE,
            memory_query_batch_norm=True,
            memory_query_layer_norm=True,
            memory_parallel=True,
            memory_output_gate=True,
            memory_output_norm=True,
        ),
        "cross_entropy",
    ),
    "flat keys": (
        lambda: tiny_language_model(**SPARSE, memory_keys="flat"),
        "cross_entropy",
    ),
    "memories that share their values": (
        lambda: tiny_language_model(**SPARSE | {"memory_layers": "1,3"}, memory_share_values=True),
        "cross_entropy",
    ),
    "memories of a translation model": (
        lambda: tiny_transformer(**TRANSLATION_MEMORIES),
        "label_smoothed_cross_entropy",
    ),
    # all of these in the default reading, sublayers
    **{
        f"branches, {name}": (
            lambda options=options: tiny_weighted_transformer(**options),
            "label_smoothed_cross_entropy",
        )
        for name, options in {
            "shake": {"branch_training": "shake"},
            "softmax": {"branch_parameterization": "softmax"},
            "top-k": {"branch_top_k": 2},
            "random outside of training": {"branch_weights": "random"},
        }.items()
    },
    "branches, as-written": (
        lambda: tiny_weighted_transformer(branch_residual="as-written"),
        "label_smoothed_cross_entropy",
    ),
    "branches of both attentions": (
        lambda: tiny_weighted_transformer(branch_decoder_attention="both"),
        "label_smoothed_cross_entropy",
    ),
}


def criterion_of(name):
    """A criterion of fairseq's by its name, or segment_loss with one of its options."""
    if name in SEGMENT_LOSSES:
        return tiny.segment_loss(**SEGMENT_LOSSES[name])
    kind, task = CRITERION_REGISTRY[name], tiny.tiny_task()
    if name == "label_smoothed_cross_entropy":
        return kind(task, sentence_avg=False, label_smoothing=0.1)
    return kind(task, sentence_avg=False)


def sample_of(model, device):
    """A batch of fairseq's on a device: text with its recurrence, or sentences."""
    if hasattr(model, "encoder"):
        net_input, target = sentences(), tiny.tokens(2, 5)
    else:
        net_input, target = {"src_tokens": tiny.tokens(2, 8)}, tiny.tokens(2, 8)
        net_input["src_lengths"] = torch.full((2,), 8)
    net_input = {name: value.to(device) for name, value in net_input.items()}
    sample = {"net_input": net_input, "target": target.to(device), "ntokens": target.numel()}
    return {**sample, "nsentences": 2, "id": torch.arange(2, device=device)}
