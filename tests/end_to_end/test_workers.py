"""Two workers whose gradients torch's DistributedDataParallel averages, as on several GPUs."""

import re

import pytest

from tests.end_to_end.commands import ALL, NO_VALIDATION, TASK, USER_DIR, train_together
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
        *("--adaptive-span", "--criterion", "span_cross_entropy", "--span-loss", 0.001),
    ),
    "transformer_xl with a memory": (
        *(*SEGMENTS, "--arch", "transformer_xl_tiny", "--memory-layers", "2", *MEMORY, *LAZY),
    ),
    "pkm_transformer_lm": (*BLOCKS, "--arch", "pkm_transformer_lm_tiny", *MEMORY, *LAZY),
}


@pytest.mark.parametrize("model", MODELS)
def test_torchs_data_parallelism_trains_as_fairseqs_does(data, tmp_path, model):
    losses = []
    for backend in ("legacy_ddp", "pytorch_ddp"):
        printed = train_together(
            *(data, *MODELS[model], "--lr", 0.003, "--max-update", 10, *ALL, *NO_VALIDATION),
            *("--log-format", "json", "--log-interval", 1, "--no-epoch-checkpoints"),
            *("--save-dir", tmp_path / backend),
            command="tests.end_to_end.train_on_cpu_workers",
            ddp_backend=backend,
        )
        losses.append(re.findall(r'"loss": "([\d.]+)"', printed))
    assert len(losses[0]) >= 10
    assert losses[0] == losses[1]
    one, other = (parameters(tmp_path / backend) for backend in ("legacy_ddp", "pytorch_ddp"))
    assert_equal(one, other, rtol=0, atol=0)
