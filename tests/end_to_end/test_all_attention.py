"""All-attention and adaptive span through fairseq's commands."""

import pytest
import torch

from tests.end_to_end.commands import MODEL, run, run_together, train
from tests.end_to_end.trainings import EXACT, assert_equal, logged, parameters, training_command


def spans(folder, file="checkpoint_last.pt"):
    """Return the learned spans of a checkpoint, one row per layer."""
    named = torch.load(folder / file, weights_only=True)["model"].items()
    return torch.stack([value for name, value in named if name.endswith("self_attn.span.value")])


@pytest.fixture(scope="module")
def learned(trained):
    """Return the folder of a run with learned spans."""
    return trained("all_attention")


def test_spans_are_logged_and_validation_logs_them_by_layer(learned):
    printed = (learned / "log").read_text()
    found = logged(printed)
    assert len({found["train_inner", n]["span_mean"] for n in range(1, 21)}) > 1
    for updates in (4, 20):
        spans = {k: float(v) for k, v in found["valid", updates].items() if "span" in k}
        assert spans.keys() >= {f"valid_span_{of}_{n}" for of in ("mean", "max") for n in (1, 2)}
        assert spans["valid_span_max"] == max(spans["valid_span_max_1"], spans["valid_span_max_2"])
        assert 4 <= spans["valid_span_mean"] <= 12
    assert "adaptive attention span up to 12" in printed
    assert "has no penalty" not in printed


@pytest.mark.parametrize(
    "precision", [("--bf16",), ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 4)]
)
def test_spans_stay_in_their_interval(corpora, tmp_path, precision):
    # four steps of 0.3 close spans that begin at 0.2
    shut = ("--span-init", 0.2, "--span-loss", 1.0, "--adagrad-clip", 0, "--lr", 0.3)
    run(*training_command(corpora, "all_attention", tmp_path, "--max-update", 4, *shut, *precision))
    found = spans(tmp_path)
    assert torch.equal(found, torch.zeros_like(found))
    assert found.dtype == torch.float32


def test_two_workers_learn_what_one_learns(corpora, tmp_path):
    options = ("--max-update", 6, "--dropout", 0, "--span-init", 0.2, "--disable-validation")
    run(*training_command(corpora, "all_attention", tmp_path / "one", *options))
    streams = ("--batch-size", 2)
    run_together(*training_command(corpora, "all_attention", tmp_path / "two", *options, *streams))
    one, two = (parameters(tmp_path / workers) for workers in ("one", "two"))
    assert_equal(two, one, rtol=1e-4, atol=1e-5)
    assert spans(tmp_path / "two").min() > 0


def test_a_resumed_run_is_the_uninterrupted_run(corpora, learned, tmp_path):
    """The past in the checkpoint is as long as the spans then, which change afterwards."""
    begun = learned / "checkpoint_1_4.pt"
    state = torch.load(begun, weights_only=True)["extra_state"]["train_iterator"]
    assert [len(hidden[0]) for hidden in state["pasts"]["layers"]] == [12, 12]
    start = ("--restore-file", begun, "--max-update", 20)
    printed = run(*training_command(corpora, "all_attention", tmp_path, *start))
    assert "resuming with recurrence" in printed
    assert_equal(parameters(tmp_path), parameters(learned), **EXACT)
    assert not torch.equal(spans(learned), spans(learned, begun.name))


def test_a_loss_without_the_penalty_is_warned_of(data, tmp_path):
    plain = ("--adaptive-span", "--max-update", 1, "--disable-validation")
    printed = train(data, tmp_path, *plain, "--criterion", "cross_entropy", model=MODEL)
    assert "--criterion cross_entropy without --span-loss has no penalty" in printed


def test_another_largest_span_takes_a_fresh_optimizer(corpora, learned, tmp_path):
    again = ("--restore-file", learned / "checkpoint_last.pt", "--reset-dataloader")
    again += ("--attention-span", 40, "--max-update", 22)
    printed = run(*training_command(corpora, "all_attention", tmp_path, *again), fails=True)
    assert "(12, 8)" in printed
    assert "(40, 8), as after another --attention-span: give --reset-optimizer" in printed
    again += ("--reset-optimizer", "--reset-lr-scheduler", "--reset-meters")
    printed = run(*training_command(corpora, "all_attention", tmp_path, *again))
    assert "trained with --attention-span 12, and here it is 40" in printed
    assert len(parameters(tmp_path)["decoder.network.positions.weight"]) == 40
