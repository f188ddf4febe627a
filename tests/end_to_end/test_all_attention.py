"""All-attention and adaptive span through fairseq's commands."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.end_to_end.commands import (
    evaluate,
    log_probabilities,
    tokens_evaluated,
    train,
    train_on_two_workers,
)
from tests.end_to_end.results import EXACT, assert_equal, parameters, scalars

SIZE = ("--decoder-layers", 2, "--decoder-embed-dim", 16, "--decoder-attention-heads", 2)
VARIANTS = ("all", "attn-split", "head-split", "single-head", "ff-attn")
ADAPTIVE = ("--adaptive-span", "--attention-span", 24, "--span-ramp", 4, "--span-init", 0.2)
LEARNING = ("--arch", "all_attention_lm", *SIZE, "--persistent-vectors", 4, *ADAPTIVE)
SPAN_LOSS = ("--criterion", "segment_loss", "--span-loss", 0.001)
# a learning rate that drives spans against both ends
WILD = ("--optimizer", "adagrad_with_clip", "--adagrad-clip", 0, "--lr", 0.3)


def train_spans(data, folder, *options, updates=10, **how):
    how.setdefault("model", LEARNING)
    return train(data, folder, *SPAN_LOSS, *WILD, "--max-update", updates, *options, **how)


def spans(folder):
    """The learned spans of the last checkpoint, a row a layer."""
    named = parameters(folder).items()
    return torch.stack([value for name, value in named if name.endswith("self_attn.span.value")])


@pytest.fixture(scope="module")
def learned(data, tmp_path_factory):
    """A run with learned spans: its folder and its log."""
    folder = tmp_path_factory.mktemp("learned")
    logged = ("--log-interval", 2, "--validate-interval-updates", 5)
    return folder, train_spans(data, folder, *logged, "--tensorboard-logdir", folder / "board")


def test_spans_appear_in_tensorboard(learned):
    board = learned[0] / "board"
    # the writer's thread may end before the last of five is written
    assert len(scalars(board, "train_inner")["span_mean"]) >= 4
    of_validation = scalars(board, "valid")
    for key in ("span_mean_1", "span_max_1", "span_mean_2", "span_max_2"):
        assert all(4 <= value <= 24 for value in of_validation[key])


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


@pytest.mark.parametrize(
    "precision",
    [(), ("--bf16",), ("--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", 4)],
    ids=["fp32", "bf16", "fp16"],
)
def test_spans_stay_in_their_interval(data, tmp_path, precision):
    train_spans(data, tmp_path, *precision, "--span-loss", 1.0, updates=4)
    shut = spans(tmp_path)
    assert torch.equal(shut, torch.zeros_like(shut))  # 0.2 less than four steps of 0.3
    assert shut.dtype == torch.float32


def test_two_workers_keep_the_same_spans_in_their_interval(data, tmp_path):
    for penalty, name in ((0.2, "shut"), (0.001, "free")):
        options = ("--criterion", "segment_loss", "--span-loss", penalty, "--lr", 0.02)
        options += ("--max-update", 6, "--disable-validation")
        train(data, tmp_path / f"one {name}", *options, model=LEARNING)
        train_on_two_workers(data, tmp_path / f"two {name}", *options, model=LEARNING)
        one, two = (spans(tmp_path / f"{workers} {name}") for workers in ("one", "two"))
        torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
        assert torch.equal(two, torch.zeros_like(two)) == (name == "shut")


def test_loss_does_not_depend_on_the_segment_length(data, learned, test_tokens):
    found = []
    for length in (1, 7, 100_000):
        options = ("--tokens-per-sample", length, "--output-word-probs")
        printed = evaluate(data, learned[0] / "checkpoint_last.pt", *options)
        assert tokens_evaluated(printed) == test_tokens
        found.append(log_probabilities(printed))
    for one, other in pairwise(found):
        np.testing.assert_allclose(one, other, atol=1e-4)
    for layer in (1, 2):
        assert f"layer {layer}: attention spans" in printed


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
    plain = ("--criterion", "cross_entropy", "--max-update", 1, "--disable-validation")
    printed = train(data, tmp_path, *plain, model=LEARNING)
    assert (
        "--criterion cross_entropy without --span-loss has no penalty for long attention spans"
        in printed
    )


def test_another_largest_span_is_refused_with_the_optimizers_state(data, learned, tmp_path):
    wider = (*LEARNING, "--attention-span", 40)
    again = ("--restore-file", learned[0] / "checkpoint_last.pt", "--reset-dataloader")
    printed = train_spans(data, tmp_path, *again, updates=12, model=wider, fails=True)
    assert "(24, 8), here (40, 8), as after another --attention-span" in printed


def test_another_largest_span_continues_with_a_fresh_optimizer(data, learned, tmp_path):
    wider = (*LEARNING, "--attention-span", 40)
    again = ("--restore-file", learned[0] / "checkpoint_last.pt", "--reset-optimizer")
    again += ("--reset-dataloader", "--reset-lr-scheduler", "--reset-meters")
    printed = train_spans(data, tmp_path, *again, updates=12, model=wider)
    assert "trained with --attention-span 24, and here it is 40" in printed
    assert len(parameters(tmp_path)["decoder.positions.weight"]) == 40
