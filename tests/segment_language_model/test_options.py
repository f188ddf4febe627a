"""Errors of segment models: each names the option or argument, its value and a remedy."""

import math
import re

import pytest
import torch
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import OmegaConf

from fairseq_plugins.segment_language_model.attention import RelativeAttention, plain_attention
from fairseq_plugins.segment_language_model.attention_blocks import Clamped, Window
from fairseq_plugins.segment_language_model.loss import SegmentLoss, SegmentLossConfig
from fairseq_plugins.segment_language_model.model import check_task
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedRelativePositions,
    SinusoidalRelativePositions,
)
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from fairseq_plugins.transformer_xl.network import TransformerXLBlock
from tests import tiny
from tests.tiny import ADAPTIVE, dictionary, segment_loss, tiny_transformer_xl

TIED_HEAD = {**ADAPTIVE, "output_bias": True, "tie_adaptive_head_proj": True}
FULL_WIDTH = {"adaptive_input_factor": 1, "adaptive_softmax_factor": 1}
NO_FFN = {"decoder_ffn_embed_dim": 0}
# the cause of each message, and a part of it
REFUSED = [
    ({"decoder_layers": 0}, "--decoder-layers is 0: it must be at least 1"),
    ({"mem_len": -1}, "--mem-len is -1: it must be at least 0"),
    ({"mem_len": "128"}, "--mem-len is '128': it must be at least 0"),
    ({"clamp_len": 0}, "--clamp-len is 0: it must be at least 1"),
    ({**ADAPTIVE, "adaptive_input_factor": 0}, "--adaptive-input-factor is 0: it must be at"),
    ({"attention_kernel": "new"}, "`kernel` is 'new': there are fast, plain"),
    ({"same_length": "yes"}, "--same-length is 'yes': give True or False"),
    ({"same_length": True, "mem_len": 0}, "--same-length without recurrence leaves"),
    ({"layer_norm_epsilon": -1.0}, "--layer-norm-epsilon is -1.0: it must be at least 0"),
    ({"attention_dropout": 1.0}, "--attention-dropout is 1.0: it must be in [0, 1)"),
    ({"output_dropout": -0.1}, "--output-dropout is -0.1: it must be in [0, 1)"),
    ({"decoder_attention_heads": 3}, "`num_heads` is 3: it must divide"),
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
]


WINDOW, KEYS, SEGMENT = Window(0, 9), torch.zeros(1, 1, 4, 3), torch.zeros(2, 4, 16)


def attend(rel_keys, **options):
    """Attend from 4 queries to 4 keys of width 3."""
    return plain_attention(KEYS, KEYS, KEYS, rel_keys, WINDOW, **options)


def block(*shape):
    """Call a block with a segment of this shape, and a past of two streams of width 16."""
    made = TransformerXLBlock(16, 2, 24, 4)
    return made(torch.zeros(shape), made(SEGMENT)[1])


# other calls that are refused, and a part of the message
REFUSED += [
    (lambda: attend(torch.zeros(1, 4, 3)), "`rel_keys` has 4 distances: 4 keys"),
    (lambda: attend(Clamped(torch.zeros(1, 0, 3))), "`rel_keys` has 0 distances"),
    (lambda: attend(torch.zeros(1, 5, 4)), "`rel_keys` is (1, 5, 4): 1 heads of width 3"),
    (lambda: attend(torch.zeros(2, 5, 3)), "`rel_keys` is (2, 5, 3): 1 heads of width 3"),
    (lambda: attend(Clamped(torch.zeros(1, 2, 4))), "`rel_keys` is (1, 2, 4): 1 heads"),
    (lambda: attend(None, distance_bias=torch.zeros(1, 2)), "`distance_bias` without `rel_keys`"),
    (lambda: RelativeAttention(8, 3, WINDOW), "`num_heads` is 3: it must divide `embed_dim`, 8"),
    (lambda: RelativeAttention(8, 2, WINDOW, kernel="new"), "`kernel` is 'new': there are fast, "),
    # the published code uses -1 for no clamp
    (lambda: SinusoidalRelativePositions(8, 0), "`clamp_len` is 0: give at least 1, or None"),
    (lambda: Distances(-1), "`clamp_len` is -1: give at least 1, or None"),
    (lambda: LearnedRelativePositions(9, 8, 0), "`clamp_len` is 0: give at least 1, or None"),
    (lambda: SinusoidalRelativePositions(15), "`embed_dim` is 15: sinusoids take an even width"),
    (lambda: block(3, 4, 16), "`past` has 2 streams and `x` has 3"),
    (lambda: block(2, 0, 16), "`x` is (2, 0, 16): give a segment (B, T, d)"),
    (lambda: block(2, 16), "`x` is (2, 16): give a segment"),
    (
        lambda: SegmentLoss.build_criterion(SegmentLossConfig(span_loss=0.1), None),
        "--span-loss is 0.1, and models of this task have no --adaptive-span",
    ),
    (lambda: segment_loss(span_loss=-0.1), "--span-loss is -0.1: it must be at least 0"),
    (lambda: segment_loss(span_loss=math.inf), "--span-loss is inf: it must be at least 0"),
    (lambda: segment_loss(span_loss=math.nan), "--span-loss is nan: it must be at least 0"),
    # errors of the task
    (
        {"compile_layers": True, "checkpoint_activations": True},
        "--compile-layers with --checkpoint-activations",
    ),
    (lambda: set_up(batch_split=0), "--batch-split is 0: it must be at least 1"),
    (lambda: set_up(tokens_per_sample=0), "--tokens-per-sample is 0: it must be at least 1"),
    (lambda: set_up(extended_context=-1), "--extended-context is -1: it must be at least 0"),
    (lambda: set_up(data=None), "DATA is missing"),
    (lambda: build(batch_split=5, batch_size=4), "--batch-split is 5 and --batch-size 4"),
    (lambda: build(batch_split=2, batch_size=None), "--batch-split is 2 and --batch-size 1"),
    (lambda: build({"zero_memory": True, "mem_len": 0}), "--zero-memory with --mem-len 0"),
    (
        lambda: build({"mem_len": 8}, extended_context=4),
        "--extended-context is 4 for a model with a recurrence of 8 tokens",
    ),
    # as in evaluation, where the task's options are not those of the training
    (
        lambda: build({"mem_len": 8}, from_checkpoint=True, extended_context=4),
        "--extended-context is 4 for a model with a recurrence of 8 tokens",
    ),
    (lambda: criterion("segment_loss", span_loss=0.1), "--span-loss is 0.1 for a model without"),
    (lambda: criterion("adaptive_loss"), "--criterion adaptive_loss leaves out a part"),
    (
        lambda: criterion("cross_entropy", {"adaptive_softmax_cutoff": "8,14"}),
        "--criterion cross_entropy is for plain softmaxes, and the model has",
    ),
    (
        lambda: check_task(LanguageModelingTask),
        "the task is LanguageModelingTask, which keeps no past",
    ),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(refused, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_transformer_xl(**refused) if isinstance(refused, dict) else refused()


def test_the_folder_that_holds_the_binarized_data_is_named(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dict.txt").touch()
    with pytest.raises(ValueError, match=rf"DATA is {tmp_path}: .* wrote: {tmp_path}/bin$"):
        set_up(data=str(tmp_path), tokens_per_sample=8)


def set_up(**options):
    """Let the task read its options."""
    SegmentLanguageModelingTask.setup_task(
        SegmentLanguageModelingConfig(**{"data": "data", **options})
    )


def build(model=None, from_checkpoint=False, **options):
    """Let the task build a Transformer-XL with these options."""
    cfg = SegmentLanguageModelingConfig(**{"batch_size": None, **options})
    task = SegmentLanguageModelingTask(cfg, dictionary())
    cfg = {"_name": "transformer_xl", **tiny.SIZES, **tiny.SEGMENTS, **(model or {})}
    return task.build_model(OmegaConf.create(cfg), from_checkpoint)


def criterion(name, model=None, **options):
    """Let the task build a model, then this loss."""
    cfg = SegmentLanguageModelingConfig(batch_size=None)
    task = SegmentLanguageModelingTask(cfg, dictionary())
    cfg = {"_name": "transformer_xl", **tiny.SIZES, **tiny.SEGMENTS, **(model or {})}
    task.build_model(OmegaConf.create(cfg))
    return task.build_criterion(OmegaConf.create({"_name": name, **options}))


def test_evaluation_may_leave_out_the_recurrence_that_a_model_was_trained_with():
    zeros = {"zero_memory": True, "mem_len": 0}
    assert build(zeros, from_checkpoint=True).decoder.network.mem_len == 0
    assert build({**zeros, "mem_len": 8}).decoder.zero_memory
