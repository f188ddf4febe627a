"""All-attention and adaptive span through fairseq's commands."""

import pytest
import torch

from tests.end_to_end.commands import MODEL, run, run_on_two_workers, train
from tests.end_to_end.trainings import assert_equal, logged, parameters, training_command


def spans(folder):
    """Return the learned spans of the last checkpoint, one row per layer."""
    named = parameters(folder).items()
    return torch.stack([value for name, value in named if name.endswith("self_attn.span.value")])


@pytest.fixture(scope="module")
def learned(trained):
    """Return the folder of a run with learned spans."""
    return trained("all_attention")


def test_training_logs_spans_and_validation_logs_them_by_layer(learned):
    printed = (learned / "log").read_text()
    numbers = logged(printed)
    assert len({numbers["train_inner", n]["span_mean"] for n in range(1, 21)}) > 1
    for updates in (4, 20):
        spans = {k: float(v) for k, v in numbers["valid", updates].items() if "span" in k}
        assert spans.keys() >= {
            f"valid_span_{kind}_{n}" for kind in ("mean", "max") for n in (1, 2)
        }
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
    shut_spans = spans(tmp_path)
    assert torch.equal(shut_spans, torch.zeros_like(shut_spans))
    assert shut_spans.dtype == torch.float32


def test_two_workers_learn_what_one_learns(corpora, tmp_path):
    options = ("--max-update", 6, "--dropout", 0, "--span-init", 0.2, "--disable-validation")
    run(*training_command(corpora, "all_attention", tmp_path / "one", *options))
    streams = ("--batch-size", 2)
    words = training_command(corpora, "all_attention", tmp_path / "two", *options, *streams)
    run_on_two_workers(tmp_path / "two", *words, "--ddp-backend", "legacy_ddp")
    one, two = (parameters(tmp_path / workers) for workers in ("one", "two"))
    assert_equal(two, one, rtol=1e-4, atol=1e-5)
    assert spans(tmp_path / "two").min() > 0


def test_training_warns_about_spans_without_a_penalty(data, tmp_path):
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
