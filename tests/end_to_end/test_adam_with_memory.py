"""A memory's values trained row by row in fairseq-train: workers, sharding, other optimizers."""

import pytest

from tests.end_to_end.commands import NO_VALIDATION, train, train_on_two_workers
from tests.end_to_end.results import assert_equal, parameters

VALUES = "decoder.layers.1.feed_forward.memory.values"
MODEL = (
    *("--arch", "transformer_xl", "--decoder-layers", "2", "--decoder-embed-dim", "16"),
    *("--decoder-attention-heads", "2", "--decoder-ffn-embed-dim", "16", "--mem-len", "8"),
    *("--memory-layers", "2", "--memory-slots", "64", "--memory-heads", "2", "--memory-knn", "4"),
    *("--memory-query-dim", "8", "--memory-query-batch-norm"),
)
# batch norm takes back what the bias before it adds, whose gradient is rounding errors: a large
# epsilon keeps Adam from making steps of them
OPTIMIZER = (
    *("--optimizer", "adam_with_memory", "--adam-eps", 1e-3, "--lr", 0.01, "--memory-lr", 0.05),
    *("--clip-norm", 0.5, "--max-update", 4),
)
SHARED = ("--memory-shard-values",)


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """Folder of a model that one worker trained on 4 streams."""
    folder = tmp_path_factory.mktemp("alone")
    train(data, folder, "--batch-size", 4, *OPTIMIZER, *NO_VALIDATION, model=MODEL)
    return folder


def test_two_workers_learn_what_one_learns(data, alone, tmp_path):
    train_on_two_workers(data, tmp_path, *OPTIMIZER, *NO_VALIDATION, model=MODEL)
    assert_equal(parameters(tmp_path), parameters(alone), rtol=1e-4, atol=1e-5)


def test_two_workers_with_shards_resume_what_one_learns(data, alone, tmp_path):
    # with validation, before which the memories of the streams are gathered
    train_on_two_workers(data, tmp_path, *OPTIMIZER, *SHARED, "--max-update", 2, model=MODEL)
    train_on_two_workers(data, tmp_path, *OPTIMIZER, *SHARED, model=MODEL)
    assert parameters(tmp_path)[VALUES].shape == (64, 16)
    assert_equal(parameters(tmp_path), parameters(alone), rtol=1e-4, atol=1e-5)
