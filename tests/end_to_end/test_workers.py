"""Two workers: torch's DistributedDataParallel, and resuming with a memory."""

import pytest
import torch
from fairseq.models import distributed_fairseq_model
from torch.nn.parallel import DistributedDataParallel

from tests.end_to_end.commands import ALL, USER_DIR, run, run_on_two_workers, train
from tests.end_to_end.trainings import EXACT, assert_equal, parameters, training_command

MEMORY = """--memory-slots 64 --memory-heads 2 --memory-knn 4 --memory-query-dim 8
    --optimizer adam_with_memory --memory-lr 0.01"""
MODELS = {
    "all_attention with spans": """--task segment_language_modeling --tokens-per-sample 8
    --arch all_attention_lm_tiny --optimizer adam --adaptive-span --criterion segment_loss
    --span-loss 0.001""",
    "pkm_transformer_lm": f"""--task language_modeling --tokens-per-sample 16
    --arch pkm_transformer_lm_tiny {MEMORY}""",
}


def let_cpus_work_together():
    """Give torch's DistributedDataParallel no device ids."""

    def wrapped(module, device_ids, output_device, **options):
        return DistributedDataParallel(module, **options)

    distributed_fairseq_model.DistributedDataParallel = wrapped


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_torchs_data_parallelism_trains_as_fairseqs_does(data, tmp_path, model):
    trained = []
    for backend in ("legacy_ddp", "pytorch_ddp"):
        run_on_two_workers(
            *(tmp_path / backend, "fairseq-train", data, *USER_DIR, *MODELS[model].split(), *ALL),
            *("--batch-size", 2, "--lr", 0.003, "--max-update", 5, "--disable-validation"),
            *("--ddp-backend", backend, "--save-dir", tmp_path / backend),
            before=let_cpus_work_together,
        )
        trained.append(parameters(tmp_path / backend))
    assert_equal(*trained, **EXACT)


def test_two_workers_with_a_memory_resume_what_one_learns(data, tmp_path):
    # batch norm cancels the bias before it, whose gradient consists of rounding errors: a large
    # epsilon keeps Adam from turning them into steps
    options = f"""--arch transformer_xl --decoder-layers 2 --decoder-embed-dim 16
    --decoder-attention-heads 2 --decoder-ffn-embed-dim 16 --mem-len 8
    --memory-layers 1,2 --memory-share-values --memory-query-batch-norm {MEMORY}
    --adam-eps 1e-3 --lr 0.01 --memory-lr 0.05 --clip-norm 0.5""".split()
    one, two = tmp_path / "one", tmp_path / "two"
    train(data, one, "--max-update", 4, "--disable-validation", *options, model=())
    # with validation, before which the pasts of all streams are gathered
    for updates in (2, 4):
        train(data, two, "--max-update", updates, *options, model=(), workers=2)
    assert_equal(parameters(two), parameters(one), rtol=1e-4, atol=1e-5)
    moments = (
        torch.load(folder / "checkpoint_last.pt", weights_only=True)["last_optimizer_state"]
        for folder in (two, one)
    )
    torch.testing.assert_close(*(state["tables"] for state in moments), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["legacy_ddp", "pytorch_ddp"])
def test_two_workers_with_branch_weights_learn_what_one_learns(corpora, tmp_path, backend):
    one, two = tmp_path / "one", tmp_path / "two"
    # a large epsilon, as above
    options = ("--dropout", 0, "--attention-dropout", 0, "--adam-eps", 1e-3, "--max-update", 6)
    # the batches of both workers
    run(*training_command(corpora, "weighted_transformer", one, *options, "--update-freq", 2))
    words = training_command(corpora, "weighted_transformer", two, *options)
    run_on_two_workers(two, *words, "--ddp-backend", backend, before=let_cpus_work_together)
    assert_equal(parameters(two), parameters(one), rtol=1e-4, atol=1e-5)
