"""All-attention and adaptive span through fairseq's commands."""

import re

import pytest
import torch

from tests.end_to_end.commands import MODEL, NO_VALIDATION, train, train_on_two_workers
from tests.end_to_end.results import EXACT, assert_equal, parameters

SPANS = (
    *(*MODEL, "--adaptive-span", "--attention-span", 24, "--span-ramp", 4, "--span-init", 0.2),
    *("--criterion", "segment_loss", "--span-loss", 0.001),
)
# a learning rate that drives spans against both ends
WILD = ("--optimizer", "adagrad_with_clip", "--adagrad-clip", 0, "--lr", 0.3)


def train_spans(data, folder, *options, updates=10, **how):
    return train(data, folder, *WILD, "--max-update", updates, *options, model=SPANS, **how)


def spans(folder):
    """The learned spans of the last checkpoint, a row a layer."""
    named = parameters(folder).items()
    return torch.stack([value for name, value in named if name.endswith("self_attn.span.value")])


@pytest.fixture(scope="module")
def learned(data, tmp_path_factory):
    """A run with learned spans: its folder and its log."""
    folder = tmp_path_factory.mktemp("learned")
    return folder, train_spans(data, folder, "--log-interval", 2, "--validate-interval-updates", 5)


def test_spans_are_logged_and_validation_logs_them_by_layer(learned):
    _, printed = learned
    in_training = re.findall(r"train_inner \|.*span_mean=([\d.]+), span_max=([\d.]+)", printed)
    assert len(in_training) == 5
    assert len(set(in_training)) > 1
    validations = [line for line in printed.splitlines() if "valid on 'valid' subset" in line]
    for line in validations:
        found = {key: float(n) for key, n in re.findall(r"(span_\w+) ([\d.]+)", line)}
        assert found.keys() >= {f"span_{of}_{n}" for of in ("mean", "max") for n in (1, 2)}
        assert found["span_max"] == max(found["span_max_1"], found["span_max_2"])
        assert 4 <= found["span_mean"] <= 24
    assert len(validations) >= 2
    assert "adaptive attention span up to 24" in printed
    assert "has no penalty" not in printed


@pytest.mark.parametrize(
    "precision", [("--bf16",), ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 4)]
)
def test_spans_stay_in_their_interval(data, tmp_path, precision):
    train_spans(data, tmp_path, *precision, "--span-loss", 1.0, updates=4)
    shut = spans(tmp_path)
    assert torch.equal(shut, torch.zeros_like(shut))  # 0.2 less than four steps of 0.3
    assert shut.dtype == torch.float32


def test_two_workers_learn_what_one_learns(data, tmp_path):
    options = ("--optimizer", "adagrad_with_clip", "--lr", 0.02, "--max-update", 6)
    train(data, tmp_path / "one", *options, *NO_VALIDATION, model=SPANS)
    train_on_two_workers(data, tmp_path / "two", *options, *NO_VALIDATION, model=SPANS)
    one, two = (parameters(tmp_path / workers) for workers in ("one", "two"))
    assert_equal(two, one, rtol=1e-4, atol=1e-5)
    assert spans(tmp_path / "two").min() > 0


def test_a_resumed_run_is_the_uninterrupted_run(data, tmp_path):
    """The memory that a checkpoint holds is as long as the spans were, which then change."""
    train_spans(data, tmp_path / "whole")
    train_spans(data, tmp_path / "parts", updates=4)
    state = torch.load(tmp_path / "parts" / "checkpoint_last.pt", weights_only=True)
    lengths = [len(h[0]) for h in state["extra_state"]["train_iterator"]["recurrence"]["layers"]]
    assert lengths == [24, 24]
    printed = train_spans(data, tmp_path / "parts")
    assert "resuming with recurrence" in printed
    assert_equal(parameters(tmp_path / "parts"), parameters(tmp_path / "whole"), **EXACT)
    assert not torch.equal(spans(tmp_path / "whole"), torch.full((2, 2), 0.2))


def test_a_loss_without_the_penalty_is_warned_of(data, tmp_path):
    plain = ("--criterion", "cross_entropy", "--max-update", 1, *NO_VALIDATION)
    printed = train(data, tmp_path, *plain, model=SPANS[:-2])
    assert "--criterion cross_entropy without --span-loss has no penalty" in printed


def test_another_largest_span_takes_a_fresh_optimizer(data, learned, tmp_path):
    again = ("--restore-file", learned[0] / "checkpoint_last.pt", "--reset-dataloader")
    again += ("--attention-span", 40)
    printed = train_spans(data, tmp_path, *again, updates=12, fails=True)
    assert "(24, 8)" in printed
    assert "(40, 8), as after another --attention-span: give --reset-optimizer" in printed
    again += ("--reset-optimizer", "--reset-lr-scheduler", "--reset-meters")
    printed = train_spans(data, tmp_path, *again, updates=12)
    assert "trained with --attention-span 24, and here it is 40" in printed
    assert len(parameters(tmp_path)["decoder.positions.weight"]) == 40
