"""--compile-layers: trainings and evaluations with torch.compile's layers equal those without."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.end_to_end.commands import USER_DIR, evaluation_command, loss, run
from tests.end_to_end.trainings import ALL, assert_equal, logged, parameters

SIZES = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2 --mem-len 8"
MODEL = f"""
    --arch transformer_xl {SIZES} --decoder-ffn-embed-dim 32 --init-std 0.3
    --optimizer sgd --lr 0.5
"""
SPANS = f"""
    --arch all_attention_lm {SIZES} --persistent-vectors 4 --attention-span 12 --adaptive-span
    --span-ramp 4 --span-init 0.2 --criterion segment_loss --span-loss 0.01
    --optimizer sgd --lr 0.5
"""
# with a large eps, Adam's steps do not turn rounding errors into signs
MEMORY = """
    --memory-layers 2 --memory-slots 64 --memory-heads 2 --memory-knn 4 --memory-query-dim 8
    --optimizer adam_with_memory --lr 0.05 --adam-eps 0.1
"""
# the recurrence is full after one segment of 8, and the test part's last segment is shorter
UPDATES = 6


def run_counted(*words):
    """Call the function of a command; return what it printed, and how many graphs it compiled."""
    torch.compiler.reset()
    counters.clear()
    return run(*words), counters["stats"]["unique_graphs"]


def train(data, folder, *options, model=MODEL):
    """Train a model in a folder; return the losses of its updates."""
    words = ("fairseq-train", data, *USER_DIR, "--task", "segment_language_modeling", *ALL)
    words += ("--tokens-per-sample", 8, "--batch-size", 4, *model.split(), "--save-dir", folder)
    words += ("--max-update", UPDATES, "--disable-validation", "--no-epoch-checkpoints", "--cpu")
    words += ("--log-format", "json", "--log-interval", 1, *options)
    printed, graphs = run_counted(*words)
    assert bool(graphs) == ("--compile-layers" in options)
    losses = torch.tensor([float(values["loss"]) for values in logged(printed).values()])
    assert len(losses) == UPDATES
    return losses


def evaluate(data, folder, compiled):
    """Return the loss of a trained model in the test part, in bits per token."""
    overrides = ("--model-overrides", repr({"compile_layers": compiled}))
    words = evaluation_command(data, folder / "checkpoint_last.pt", *overrides)
    printed, graphs = run_counted(*words)
    assert bool(graphs) == compiled
    return loss(printed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (MODEL, "--attention-kernel sdpa"),
        (MODEL, MEMORY),
        (MODEL, "--checkpoint-activations"),
        (SPANS, "--attention-kernel sdpa"),
    ],
    ids=["sdpa", "memory", "recomputed", "spans"],
)
def test_compiled_layers_train_and_evaluate_alike(data, tmp_path, model, options):
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    losses = train(data, plain, *options.split(), model=model)
    # losses are logged with three digits
    words = (*options.split(), "--compile-layers")
    compiled_losses = train(data, compiled, *words, model=model)
    torch.testing.assert_close(compiled_losses, losses, rtol=0, atol=0.0011)
    assert_equal(parameters(compiled), parameters(plain), rtol=1e-5, atol=1e-5)
    bits = evaluate(data, plain, compiled=False)
    assert evaluate(data, plain, compiled=True) == pytest.approx(bits, abs=1e-4)


@pytest.mark.slow
def test_compiled_layers_round_to_bf16_as_much_as_plain_ones(data, tmp_path):
    exact = train(data, tmp_path / "exact")
    plain = train(data, tmp_path / "plain", "--bf16")
    compiled = train(data, tmp_path / "compiled", "--bf16", "--compile-layers")
    rounding = (plain - exact).abs().max()
    assert (compiled - plain).abs().max() <= 2 * rounding
    assert (compiled - exact).abs().max() <= 2 * rounding
    assert evaluate(data, tmp_path / "compiled", compiled=True) == pytest.approx(
        evaluate(data, tmp_path / "compiled", compiled=False), abs=1e-3
    )
