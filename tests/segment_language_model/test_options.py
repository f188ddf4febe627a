"""Options that all segment models have: each refusal names the option, its value and a remedy."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_plugins.fairseq_integration.error_messages import sizes_in_memory
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests.tiny import ADAPTIVE, dictionary, tiny_transformer_xl

TIED_HEAD = {**ADAPTIVE, "output_bias": True, "tie_adaptive_head_proj": True}
FULL_WIDTH = {"adaptive_input_factor": 1, "adaptive_softmax_factor": 1}
NO_FFN = {"decoder_ffn_embed_dim": 0}
# what causes each message, and a part of it
REFUSED = [
    ({"decoder_layers": 0}, "--decoder-layers is 0: it must be at least 1"),
    ({"mem_len": -1}, "--mem-len is -1: it must be at least 0"),
    ({"mem_len": "128"}, "--mem-len is '128': it must be at least 0"),
    ({"clamp_len": 0}, "--clamp-len is 0: it must be at least 1"),
    ({**ADAPTIVE, "adaptive_input_factor": 0}, "--adaptive-input-factor is 0: it must be at"),
    ({"attention_kernel": "new"}, "--attention-kernel is 'new': there are fast, plain"),
    ({"same_length": "yes"}, "--same-length is 'yes': give True or False"),
    ({"same_length": True, "mem_len": 0}, "--same-length without recurrence leaves"),
    ({"layer_norm_epsilon": 0.0}, "--layer-norm-epsilon is 0.0: it must be above 0"),
    ({"attention_dropout": 1.0}, "--attention-dropout is 1.0: it must be in [0, 1)"),
    ({"output_dropout": -0.1}, "--output-dropout is -0.1: it must be in [0, 1)"),
    ({**ADAPTIVE, "adaptive_softmax_dropout": 2.0}, "--adaptive-softmax-dropout is 2.0: it must"),
    ({"decoder_attention_heads": 3}, "--decoder-attention-heads is 3: it must divide"),
    ({**NO_FFN, "activation_dropout": 0.1}, "--activation-dropout needs --decoder-ffn-embed-dim"),
    ({"no_decoder_final_norm": True}, "--no-decoder-final-norm needs --decoder-normalize-before"),
    ({"adaptive_input": True}, "--adaptive-input needs --adaptive-input-cutoff"),
    ({"adaptive_input_cutoff": "8"}, "--adaptive-input-cutoff needs --adaptive-input"),
    ({"adaptive_softmax_dropout": 0.1}, "--adaptive-softmax-dropout needs --adaptive-softmax-cut"),
    ({"tie_adaptive_weights": True}, "--tie-adaptive-weights needs --adaptive-input"),
    ({**ADAPTIVE, "adaptive_softmax_cutoff": None}, "-weights needs --adaptive-softmax-cutoff"),
    ({**ADAPTIVE, "tie_adaptive_weights": False}, "-proj needs --tie-adaptive-weights"),
    ({**TIED_HEAD, "tie_adaptive_proj": False}, "-head-proj needs --tie-adaptive-proj"),
    ({**TIED_HEAD, "output_bias": False}, "--tie-adaptive-head-proj needs --output-bias"),
    ({"no_adaptive_head_proj": True}, "--no-adaptive-head-proj needs --tie-adaptive-weights"),
    ({**TIED_HEAD, "no_adaptive_head_proj": True}, "with --tie-adaptive-head-proj: leave one of"),
    ({**TIED_HEAD, **FULL_WIDTH}, "--tie-adaptive-head-proj with --adaptive-softmax-factor 1"),
    ({**ADAPTIVE, "share_decoder_input_output_embed": True}, "ties plain embeddings"),
    ({**ADAPTIVE, "adaptive_softmax_cutoff": "9"}, "--adaptive-softmax-cutoff, not 8,14 and 9"),
    ({"adaptive_softmax_cutoff": "9,8"}, "-cutoff is '9,8': it must be rising numbers"),
    ({"adaptive_softmax_cutoff": "some"}, "-cutoff is 'some': it must be rising numbers"),
    ({"adaptive_softmax_cutoff": "8,100"}, "'8,100': its last number must be below the 20"),
    ({"adaptive_softmax_cutoff": "1,8"}, "'1,8': its first number must be at least 4"),
    ({"adaptive_softmax_cutoff": "8,10,12"}, "--adaptive-softmax-factor is 4: 3 cutoffs leave"),
    ({"decoder_layers": 10**9}, "--decoder-layers is 1000000000, "),
    ({"decoder_embed_dim": 2**30}, "--decoder-embed-dim 1073741824 and "),
    ({"decoder_ffn_embed_dim": 2**40}, "--decoder-ffn-embed-dim 1099511627776: the weights take"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_make_no_model_are_refused_by_name(options, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 (the message is checked below)
        tiny_transformer_xl(**options)
    assert message in str(refused.value)


def test_a_model_that_memory_does_not_hold_is_refused_with_its_sizes():
    cfg = SimpleNamespace(decoder_layers=2, decoder_embed_dim=2**50, persistent_vectors=0)
    sizes = r"\(--decoder-layers 2, --decoder-embed-dim 1125899906842624\)"
    with (
        pytest.raises(ValueError, match=f"more memory than this machine has {sizes}: give smaller"),
        sizes_in_memory(cfg),
    ):
        torch.empty(2**50)
    with pytest.raises(RuntimeError, match="something else"), sizes_in_memory(cfg):
        raise RuntimeError("something else")


def build(model=None, from_checkpoint=False, **options):
    """A Transformer-XL by the task with such options."""
    task = SegmentLanguageModelingTask(SegmentLanguageModelingConfig(**options), dictionary())
    sizes = {"decoder_layers": 1, "decoder_embed_dim": 16, "decoder_attention_heads": 2}
    cfg = {"_name": "transformer_xl", "tokens_per_sample": 8, "extended_context": 0, **sizes}
    return task.build_model(OmegaConf.create({**cfg, **(model or {})}), from_checkpoint)


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ({}, {"batch_split": 0}, "--batch-split is 0: it must be at least 1"),
        ({}, {"batch_split": 5, "batch_size": 4}, "5 and --batch-size 4: .* --batch-split 4 or"),
        (
            {},
            {"batch_split": 2, "batch_size": None},
            "--batch-split is 2 and --batch-size 1: a part has at least one",
        ),
        ({}, {"softmax_temperature": 1.1}, "--softmax-temperature is 1.1: leave it out of fairse"),
        ({"zero_memory": True, "mem_len": 0}, {}, "--zero-memory with --mem-len 0: .*; give a lar"),
        (
            {"positions": "learned-absolute"},
            {"segment_jitter": 4},
            "--segment-jitter is 4 with --positions learned-absolute",
        ),
    ],
)
def test_training_with_what_the_task_cannot_do_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        build(model, **options)


def test_evaluation_may_leave_out_the_recurrence_that_a_model_was_trained_with():
    zeros = {"zero_memory": True, "mem_len": 0}
    assert build(zeros, from_checkpoint=True).decoder.context.mem_len == 0
    assert build({**zeros, "mem_len": 8}).decoder.context.from_zeros
