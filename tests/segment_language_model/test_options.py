"""Errors of segment models: each names the option or argument, its value and a remedy."""

import math
import os
import re
from types import SimpleNamespace

import pytest
import torch
from fairseq_plugins.fairseq_integration.error_messages import sizes_in_memory
from omegaconf import OmegaConf

from fairseq_plugins.segment_language_model.attention import RelativeAttention, plain_attention
from fairseq_plugins.segment_language_model.attention_blocks import Clamped, Window
from fairseq_plugins.segment_language_model.positions import (
    Distances,
    LearnedRelativePositions,
    SinusoidalRelativePositions,
)
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from fairseq_plugins.transformer_xl.layers import TransformerXLBlock
from tests import tiny
from tests.tiny import ADAPTIVE, dictionary, segment_loss, tiny_model, tiny_transformer_xl

TIED_HEAD = {**ADAPTIVE, "output_bias": True, "tie_adaptive_head_proj": True}
FULL_WIDTH = {"adaptive_input_factor": 1, "adaptive_softmax_factor": 1}
NO_FFN, LEARNED = {"decoder_ffn_embed_dim": 0}, {"positions": "learned-absolute"}
# the cause of each message, and a part of it
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


WINDOW, KEYS, SEGMENT = Window(0, 9), torch.zeros(1, 1, 4, 3), torch.zeros(2, 4, 16)


def attend(rel_keys, **options):
    """Attend from 4 queries to 4 keys of width 3."""
    return plain_attention(KEYS, KEYS, KEYS, rel_keys, WINDOW, **options)


def block(*shape):
    """Call a block with a segment of this shape, and a memory of two streams of width 16."""
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
    (lambda: RelativeAttention(8, 2, Window(3, 2)), "nothing would be left to attend to"),
    (lambda: RelativeAttention(8, 3, WINDOW), "`num_heads` is 3: it must divide `embed_dim`, 8"),
    (lambda: RelativeAttention(8, 2, WINDOW, kernel="new"), "`kernel` is 'new': there are fast, "),
    (lambda: RelativeAttention(16, 2, WINDOW, Distances())(SEGMENT), "`positions` is None"),
    (lambda: RelativeAttention(16, 2, WINDOW)(SEGMENT, None, SEGMENT), "`past` is a Tensor"),
    # the published code uses -1 for no clamp
    (lambda: SinusoidalRelativePositions(8, 0), "`clamp_len` is 0: give at least 1, or None"),
    (lambda: Distances(-1), "`clamp_len` is -1: give at least 1, or None"),
    (lambda: LearnedRelativePositions(9, 8, 0), "`clamp_len` is 0: give at least 1, or None"),
    (lambda: SinusoidalRelativePositions(15), "`embed_dim` is 15: sinusoids take an even width"),
    (lambda: block(3, 4, 16), "`past` has 2 streams and `x` has 3"),
    (lambda: block(2, 0, 16), "`x` is (2, 0, 16): give a segment (B, T, 16)"),
    (lambda: block(2, 16), "`x` is (2, 16): give a segment"),
    (lambda: block(2, 4, 8), "`x` is (2, 4, 8): give a segment"),
    (lambda: segment_loss(span_loss=-0.1), "--span-loss is -0.1: it must be at least 0"),
    (lambda: segment_loss(activation_penalty=math.inf), "--activation-penalty is inf"),
    (lambda: segment_loss(temporal_penalty=math.nan), "--temporal-penalty is nan"),
    (lambda: segment_loss(span_loss=0.1)(tiny_model(), {}), "--span-loss is 0.1 for a model "),
    # errors of the task
    (lambda: build(batch_split=0), "--batch-split is 0: it must be at least 1"),
    (lambda: build(batch_split=5, batch_size=4), "--batch-split is 5 and --batch-size 4"),
    (lambda: build(batch_split=2, batch_size=None), "--batch-split is 2 and --batch-size 1"),
    (lambda: build(softmax_temperature=1.1), "--softmax-temperature is 1.1"),
    (lambda: build({"zero_memory": True, "mem_len": 0}), "--zero-memory with --mem-len 0"),
    (lambda: build(LEARNED, segment_jitter=4), "--segment-jitter is 4 with --positions learned-"),
]


@pytest.mark.parametrize(("refused", "message"), REFUSED)
def test_what_cannot_be_is_refused_by_name(refused, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_transformer_xl(**refused) if isinstance(refused, dict) else refused()


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


def test_weights_far_beyond_the_memory_are_refused_adaptive_embeddings_apart(monkeypatch):
    # a layer takes 4 * 16 * (4 * 16 + 2 * 24) = 7168 bytes, plain embeddings 4 * 20 * 16 = 1280
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 1, "SC_PAGE_SIZE": 7500 // 4}.get)
    tiny_transformer_xl(decoder_layers=1, **ADAPTIVE)
    with pytest.raises(ValueError, match=r"--decoder-embed-dim 16 and .* give smaller sizes"):
        tiny_transformer_xl(decoder_layers=1)


def test_the_folder_that_holds_the_binarized_data_is_named(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dict.txt").touch()
    options = SegmentLanguageModelingConfig(data=str(tmp_path), tokens_per_sample=8)
    with pytest.raises(ValueError, match=rf"DATA is {tmp_path}: .* wrote: {tmp_path}/bin$"):
        SegmentLanguageModelingTask.setup_task(options)


def build(model=None, given=(), **options):
    """Let the task build a Transformer-XL with these options."""
    task = SegmentLanguageModelingTask(SegmentLanguageModelingConfig(**options), dictionary())
    cfg = {"_name": "transformer_xl", **tiny.SIZES, **tiny.SEGMENTS, **(model or {})}
    return task.build_model(OmegaConf.create(cfg), *given)


def test_weights_that_are_not_finite_are_refused():
    model = tiny_model()
    model.decoder.layers[1].self_attn.persistent.keys.data[0, 0, 0] = math.nan
    with pytest.raises(FloatingPointError, match=r"persistent.keys has a number that"):
        tiny_model().load_state_dict(model.state_dict())


def test_evaluation_may_leave_out_the_recurrence_that_a_model_was_trained_with():
    zeros = {"zero_memory": True, "mem_len": 0}
    assert build(zeros, given=(True,)).decoder.context.mem_len == 0
    assert build({**zeros, "mem_len": 8}).decoder.context.from_zeros
