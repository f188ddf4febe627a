"""Errors of segment models: each names the option or argument, its value and a remedy."""

import math
import re

import pytest
import torch
from omegaconf import OmegaConf

from fairseq_plugins.segment_language_model.attention import plain_attention
from fairseq_plugins.segment_language_model.attention_blocks import Window
from fairseq_plugins.segment_language_model.positions import Distances, SinusoidalRelativePositions
from fairseq_plugins.segment_language_model.streams import RunningText
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests import tiny
from tests.tiny import ADAPTIVE, dictionary, segment_loss, text, tiny_transformer_xl

TIED_HEAD = {**ADAPTIVE, "output_bias": True, "tie_adaptive_head_proj": True}
ALONE = {"adaptive_softmax_cutoff": "8,14"}
FULL_WIDTH = {"adaptive_input_factor": 1, "adaptive_softmax_factor": 1}


# one or two cases a kind: a range, a type, an option that needs another one, two that exclude each
# other, cutoffs that the dictionary cannot have
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_layers": 0}, "--decoder-layers is 0: it must be at least 1"),
        ({"same_length": "yes"}, "--same-length is 'yes': give True or False"),
        ({"attention_dropout": 1.0}, "--attention-dropout is 1.0: it must be at least 0 and"),
        ({"same_length": True, "mem_len": 0}, "--same-length without recurrence leaves"),
        ({"no_decoder_final_norm": True}, "-final-norm needs --decoder-normalize-before"),
        ({"adaptive_input": True}, "--adaptive-input needs --adaptive-input-cutoff"),
        ({**TIED_HEAD, "no_adaptive_head_proj": True}, "with --tie-adaptive-head-proj: leave one"),
        ({**TIED_HEAD, **FULL_WIDTH}, "--tie-adaptive-head-proj with --adaptive-softmax-factor 1"),
        ({**ADAPTIVE, "adaptive_softmax_cutoff": "9"}, "--adaptive-softmax-cutoff, not 8,14 and 9"),
        ({"adaptive_softmax_cutoff": "9,8"}, "-cutoff is '9,8': it must be rising numbers"),
        ({"adaptive_softmax_cutoff": "8,20"}, "'8,20': its last number must be below the 20"),
        ({"adaptive_softmax_cutoff": "1,8"}, "'1,8': its first number must be at least 4"),
        ({"adaptive_softmax_cutoff": "8,10,12"}, "--adaptive-softmax-factor is 4: 3 cutoffs leave"),
        (
            {"compile_layers": True, "checkpoint_activations": True, "memory_layers": "1"}
            | {"memory_query_batch_norm": True},
            "with --checkpoint-activations and --memory-query-batch-norm",
        ),
        ({"share_decoder_input_output_embed": True, **ALONE}, "ties plain embeddings"),
    ],
)
def test_a_model_refuses_impossible_options(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tiny_transformer_xl(**options)


def attend(rel_keys, **options):
    """Attend to four keys of one head of width 3."""
    keys = torch.zeros(1, 1, 4, 3)
    return plain_attention(keys, keys, keys, rel_keys, Window(0, 9), **options)


def setup(**options):
    """Let fairseq set up the task."""
    return SegmentLanguageModelingTask.setup_task(SegmentLanguageModelingConfig(**options))


def make_task(**options):
    """Let the task read its options."""
    options = {"batch_size": None, **options}
    return SegmentLanguageModelingTask(SegmentLanguageModelingConfig(**options), dictionary())


def build(task, from_checkpoint=False, criterion=None, **options):
    """Let the task build a Transformer-XL with these options, and perhaps a loss."""
    cfg = {"_name": "transformer_xl", **tiny.SIZES, **tiny.SEGMENTS, **options}
    model = task.build_model(OmegaConf.create(cfg), from_checkpoint)
    if criterion is not None:
        task.build_criterion(OmegaConf.create(criterion))
    return model


IN_PARTS = make_task(batch_split=2, batch_size=4)
TASK, SPAN_LOSS = make_task(), {"_name": "segment_loss", "span_loss": 0.1}
BANDS = {"adaptive_softmax_cutoff": "8,14", "criterion": {"_name": "cross_entropy"}}


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        # the published code uses -1 for no clamp
        (Distances, {"clamp_len": -1}, "`clamp_len` is -1: give at least 1, or None"),
        (SinusoidalRelativePositions, {"embed_dim": 15}, "`embed_dim` is 15: sinusoids take an"),
        (attend, {"rel_keys": torch.zeros(1, 4, 3)}, "`rel_keys` has 4 distances: 4 keys"),
        (attend, {"rel_keys": torch.zeros(2, 5, 3)}, "`rel_keys` is (2, 5, 3): 1 heads of width 3"),
        (attend, {"rel_keys": None, "distance_bias": torch.zeros(1, 2)}, "without `rel_keys`"),
        (setup, {"data": "data", "batch_split": 0}, "--batch-split is 0: it must be at least 1"),
        (build, {"task": make_task(batch_split=5, batch_size=4)}, "is 5 and --batch-size 4"),
        (
            build,
            {"task": IN_PARTS, "memory_layers": "2", "memory_query_batch_norm": True},
            "--batch-split is 2 with --memory-query-batch-norm",
        ),
        (build, {"task": TASK, "zero_past": True, "mem_len": 0}, "--zero-past with --mem-len"),
        # as in evaluation, where the task's options are not those of the training
        (
            build,
            {"task": make_task(extended_context=4), "mem_len": 8, "from_checkpoint": True},
            "--extended-context is 4 for a model with a recurrence of 8 tokens",
        ),
        (build, {"task": TASK, "criterion": SPAN_LOSS}, "--span-loss is 0.1 for a model without"),
        (build, {"task": TASK, **BANDS}, "--criterion cross_entropy is for plain softmaxes, and"),
        (
            build,
            {"task": TASK, "criterion": {"_name": "adaptive_loss"}},
            "--criterion adaptive_loss",
        ),
        (segment_loss, {"span_loss": math.inf}, "--span-loss is inf: it must be at least 0"),
    ],
)
def test_layers_tasks_and_losses_refuse_what_does_not_fit(make, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(**arguments)


def test_a_task_names_the_folder_of_the_data(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dict.txt").touch()
    with pytest.raises(ValueError, match=rf"DATA is {tmp_path}: .* wrote: {tmp_path}/bin$"):
        setup(data=str(tmp_path))


def test_options_have_their_effect_under_their_former_names():
    assert build(make_task(), zero_memory=True, mem_len=8).decoder.zero_past
    former, now, without = (
        build(make_task(), **{"same_length": True, "mem_len": 4, name: True})
        for name in ("same_length_besides_itself", "same_length_excludes_self", "same_length")
    )
    windows = [model.decoder.network.layers[0].self_attn.window for model in (former, now, without)]
    assert windows[0] == windows[1] != windows[2]
    former = SegmentLanguageModelingConfig(no_save_memory=True)
    task = SegmentLanguageModelingTask(former, dictionary())
    task.datasets["train"] = RunningText(text(40))
    assert not task.get_batch_iterator(task.datasets["train"]).save_pasts


def test_evaluation_may_leave_out_the_recurrence_of_the_training():
    zeros, task = {"zero_past": True, "mem_len": 0}, make_task()
    assert build(task, from_checkpoint=True, **zeros).decoder.network.mem_len == 0
    assert build(task, **{**zeros, "mem_len": 8}).decoder.zero_past


def test_batch_norm_matters_only_to_a_training_in_parts_with_a_memory():
    norm = {"memory_query_batch_norm": True}
    for task, from_checkpoint, layers in (
        (IN_PARTS, True, "2"),
        (IN_PARTS, False, ""),
        (TASK, False, "2"),
    ):
        build(task, from_checkpoint, memory_layers=layers, **norm)
