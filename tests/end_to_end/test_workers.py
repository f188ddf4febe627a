"""Two workers: torch's DistributedDataParallel, and the values of a memory."""

import re

import pytest

from tests.end_to_end.commands import (
    ALL,
    NO_VALIDATION,
    TASK,
    USER_DIR,
    train,
    train_on_two_workers,
    train_together,
)
from tests.end_to_end.results import assert_equal, parameters

SEGMENTS = (*TASK, "--tokens-per-sample", 8, "--batch-size", 2)
BLOCKS = (*USER_DIR, "--task", "language_modeling", "--tokens-per-sample", 16, "--batch-size", 2)
MEMORY = ("--memory-slots", 64, "--memory-heads", 2, "--memory-knn", 4, "--memory-query-dim", 8)
LAZY = ("--optimizer", "adam_with_memory", "--memory-lr", 0.01)
ADAM = ("--optimizer", "adam")
MODELS = {
    "transformer_xl": (*SEGMENTS, "--arch", "transformer_xl_tiny", *ADAM),
    "all_attention with spans": (
        *(*SEGMENTS, "--arch", "all_attention_lm_tiny", *ADAM),
        *("--adaptive-span", "--criterion", "segment_loss", "--span-loss", 0.001),
    ),
    "transformer_xl with a memory": (
        *(*SEGMENTS, "--arch", "transformer_xl_tiny", "--memory-layers", "2", *MEMORY, *LAZY),
    ),
    "pkm_transformer_lm": (*BLOCKS, "--arch", "pkm_transformer_lm_tiny", *MEMORY, *LAZY),
}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_torchs_data_parallelism_trains_as_fairseqs_does(data, tmp_path, model):
    losses = []
    for backend in ("legacy_ddp", "pytorch_ddp"):
        printed = train_together(
            *(data, *MODELS[model], "--lr", 0.003, "--max-update", 5, *ALL, *NO_VALIDATION),
            *("--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints"),
            *("--save-dir", tmp_path / backend),
            command="tests.end_to_end.train_on_cpu_workers",
            ddp_backend=backend,
        )
        losses.append(re.findall(r'"loss": "([\d.]+)"', printed))
    assert len(losses[0]) >= 5
    assert losses[0] == losses[1]
    one, other = (parameters(tmp_path / backend) for backend in ("legacy_ddp", "pytorch_ddp"))
    assert_equal(one, other, rtol=0, atol=0)


VALUES = "decoder.layers.1.feed_forward.memory.values"
WITH_MEMORY = (
    *("--arch", "transformer_xl", "--decoder-layers", "2", "--decoder-embed-dim", "16"),
    *("--decoder-attention-heads", "2", "--decoder-ffn-embed-dim", "16", "--mem-len", "8"),
    *("--memory-layers", "2", *MEMORY, "--memory-query-batch-norm"),
)
# batch norm takes back what the bias before it adds, whose gradient is rounding errors: a large
# epsilon keeps Adam from making steps of them
ROW_BY_ROW = (
    *("--optimizer", "adam_with_memory", "--adam-eps", 1e-3, "--lr", 0.01, "--memory-lr", 0.05),
    *("--clip-norm", 0.5, "--max-update", 4),
)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """Folder of a model that one worker trained on 4 streams."""
    folder = tmp_path_factory.mktemp("alone")
    train(data, folder, "--batch-size", 4, *ROW_BY_ROW, *NO_VALIDATION, model=WITH_MEMORY)
    return folder


def test_two_workers_learn_the_values_that_one_learns(data, alone, tmp_path):
    train_on_two_workers(data, tmp_path, *ROW_BY_ROW, *NO_VALIDATION, model=WITH_MEMORY)
    assert_equal(parameters(tmp_path), parameters(alone), rtol=1e-4, atol=1e-5)


def test_two_workers_with_shards_resume_what_one_learns(data, alone, tmp_path):
    # with validation, before which the memories of the streams are gathered
    train_on_two_workers(
        data, tmp_path, *ROW_BY_ROW, "--memory-shard-values", "--max-update", 2, model=WITH_MEMORY
    )
    train_on_two_workers(data, tmp_path, *ROW_BY_ROW, "--memory-shard-values", model=WITH_MEMORY)
    assert parameters(tmp_path)[VALUES].shape == (64, 16)
    assert_equal(parameters(tmp_path), parameters(alone), rtol=1e-4, atol=1e-5)
