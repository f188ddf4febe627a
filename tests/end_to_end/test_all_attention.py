"""All-attention and adaptive span through fairseq's commands."""

import torch

from tests.end_to_end.commands import run, run_on_two_workers, train
from tests.end_to_end.trainings import assert_equal, parameters, training_command


def spans(folder):
    """Return the learned spans of the last checkpoint, one row per layer."""
    named = parameters(folder).items()
    return torch.stack([value for name, value in named if name.endswith("self_attn.span.value")])


def test_spans_stay_in_their_interval_and_in_fp32(corpora, tmp_path):
    # four steps of 0.3 close spans that begin at 0.2
    shut = ("--span-init", 0.2, "--span-loss", 1.0, "--adagrad-clip", 0, "--lr", 0.3, "--bf16")
    run(*training_command(corpora, "all_attention", tmp_path, "--max-update", 4, *shut))
    shut_spans = spans(tmp_path)
    assert torch.equal(shut_spans, torch.zeros_like(shut_spans))
    assert shut_spans.dtype == torch.float32


def test_two_workers_learn_what_one_learns(corpora, tmp_path):
    options = ("--max-update", 6, "--dropout", 0, "--span-init", 0.2, "--disable-validation")
    run(*training_command(corpora, "all_attention", tmp_path / "one", *options))
    options += ("--batch-size", 5, "--ddp-backend", "legacy_ddp")
    words = training_command(corpora, "all_attention", tmp_path / "two", *options)
    run_on_two_workers(tmp_path / "two", *words)
    one, two = (parameters(tmp_path / workers) for workers in ("one", "two"))
    assert_equal(two, one, rtol=1e-4, atol=1e-5)
    assert spans(tmp_path / "two").min() > 0


def test_training_warns_about_spans_without_a_penalty(data, tmp_path):
    printed = train(data, tmp_path, "--adaptive-span", "--max-update", 1, "--disable-validation")
    assert "--criterion cross_entropy without --span-loss has no penalty" in printed
