"""--compile-layers: trainings and evaluations with torch.compile's layers equal those without."""

import pytest
import torch
from torch._dynamo.utils import counters

from tests.end_to_end.commands import USER_DIR, evaluation_command, loss, run
from tests.end_to_end.trainings import ALL, assert_equal, logged, parameters

MODEL = """
    --arch transformer_xl --decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2
    --decoder-ffn-embed-dim 32 --mem-len 8 --init-std 0.3 --optimizer sgd --lr 0.5
"""
# with a large eps, Adam's steps do not turn rounding errors into signs
MEMORY = """
    --memory-layers 2 --memory-slots 64 --memory-heads 2 --memory-knn 4 --memory-query-dim 8
    --optimizer adam_with_memory --lr 0.05 --adam-eps 0.1
"""
# the recurrence is full after one segment of 8, and the test part's last segment is shorter
UPDATES = 6
EQUAL = {"rtol": 1e-5, "atol": 1e-5}
# bf16 has 8 binary digits, and a compiled layer rounds fewer intermediate results
ROUNDED = {"rtol": 0.02, "atol": 0.02}


def run_counted(*words):
    """Call the function of a command; return what it printed, and how many graphs it compiled."""
    torch.compiler.reset()
    counters.clear()
    return run(*words), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "precision", "tolerance"),
    [
        ("", (), EQUAL),
        (MEMORY, (), EQUAL),
        ("", ("--bf16",), ROUNDED),
    ],
    ids=["fp32", "memory", "bf16"],
)
def test_compiled_layers_train_and_evaluate_alike(data, tmp_path, options, precision, tolerance):
    words = ("fairseq-train", data, *USER_DIR, "--task", "segment_language_modeling", *ALL)
    words += ("--tokens-per-sample", 8, "--batch-size", 4, *MODEL.split(), *options.split())
    words += ("--max-update", UPDATES, "--disable-validation", "--no-epoch-checkpoints", "--cpu")
    words += ("--log-format", "json", "--log-interval", 1, *precision)
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    losses = []
    for folder, more in ((plain, ()), (compiled, ("--compile-layers",))):
        printed, graphs = run_counted(*words, "--save-dir", folder, *more)
        assert bool(graphs) == bool(more)
        losses.append([float(values["loss"]) for values in logged(printed).values()])
    assert len(losses[0]) == UPDATES
    digits = 0.03 if precision else 0.0011
    assert losses[1] == pytest.approx(losses[0], abs=digits)
    assert_equal(parameters(compiled), parameters(plain), **tolerance)
    evaluated = []
    for switch in (False, True):
        overrides = ("--model-overrides", repr({"compile_layers": switch}))
        words = evaluation_command(data, plain / "checkpoint_last.pt", *overrides)
        printed, graphs = run_counted(*words)
        assert bool(graphs) == switch
        evaluated.append(loss(printed))
    assert evaluated[0] == pytest.approx(evaluated[1], abs=1e-4)
