"""Models in Python give the same results as fairseq's commands, in every printed digit."""

import math
import re

import numpy as np
import pytest

from fairseq_plugins import load
from fairseq_plugins.all_attention.model import AllAttentionLanguageModel
from tests.end_to_end.commands import (
    ALL,
    TASK,
    USER_DIR,
    evaluate,
    log_probabilities,
    loss,
    run,
    tokens_evaluated,
)
from tests.scripts.evaluate.saved_memory_models import TOKENS, write_all


@pytest.fixture(scope="module")
def model(checkpoint, data):
    """Load the small all-attention model."""
    return load(checkpoint, data)


@pytest.fixture(scope="module")
def text(data):
    return (data.parent / "test.txt").read_text(encoding="utf-8")


def assert_printed(score, printed):
    """Check a score against the output of fairseq-eval-lm, in the digits that it prints."""
    assert len(score) == tokens_evaluated(printed)
    np.testing.assert_allclose(score.log_probs, log_probabilities(printed), atol=1.1e-6)
    assert f"{score.nats / math.log(2):.4f}" == f"{loss(printed):.4f}"
    assert f"{math.exp(score.nats):.2f}" == re.search(r"Perplexity: ([\d.]+)", printed)[1]


@pytest.mark.parametrize(
    ("length", "overrides"), [(8, {}), (5, {"mem_len": 3})], ids=["as trained", "otherwise"]
)
def test_score_equals_fairseq_eval_lm(data, checkpoint, text, length, overrides):
    words = ("--output-word-probs", "--tokens-per-sample", length, "--model-overrides", overrides)
    printed = evaluate(data, checkpoint, *words)
    model = load(checkpoint, data, tokens_per_sample=length, **overrides)
    assert_printed(model.score(text), printed)
    stream = model.stream()
    lines = [stream.score(line) for line in text.splitlines(keepends=True)]
    assert_printed(sum(lines[1:], lines[0]), printed)


def test_score_split_equals_fairseq_eval_lm(data, transformer_xl):
    changed = {"mem_len": 6, "same_length": True, "clamp_len": 4}
    printed = evaluate(data, transformer_xl, "--batch-size", 3, "--model-overrides", changed)
    losses = load(transformer_xl, data, **changed).score_split("test", batch_size=3)
    assert len(losses) == tokens_evaluated(printed)
    assert f"{losses.mean() / math.log(2):.4f}" == f"{loss(printed):.4f}"
    # each of the three options has an effect
    for option, value in (("mem_len", 12), ("same_length", False), ("clamp_len", None)):
        other = load(transformer_xl, data, **{**changed, option: value})
        assert abs(other.score_split("test", batch_size=3).mean() - losses.mean()) > 1e-4


def test_score_in_blocks_equals_fairseq_eval_lm(tmp_path):
    saved = write_all(tmp_path)
    task = (*USER_DIR, "--task", "language_modeling", *ALL)
    path = ("--path", saved / "blocks.pt", "--gen-subset", "test", "--tokens-per-sample", 10)
    printed = run("fairseq-eval-lm", saved / "text", *task, *path, "--output-word-probs")
    # fairseq scores the blocks in its own order
    lines = re.findall(r"fairseq_cli.eval_lm \| (\d+) (.*\[-.*)$", printed, re.MULTILINE)
    in_order = "\n".join(line for _, line in sorted(lines, key=lambda line: int(line[0])))
    letters = re.findall(r"(\S+) \[-", in_order)
    text = "".join("\n" if letter == "</s>" else letter for letter in letters)
    score = load(saved / "blocks.pt", saved / "text").score(text)
    np.testing.assert_allclose(score.log_probs, log_probabilities(in_order), atol=1.1e-6)
    assert f"{score.loss:.4f}" == f"{loss(printed):.4f}"
    assert len(score) == TOKENS


def test_score_equals_fairseq_interactive(data, checkpoint, model):
    lines = ["the cat\n", "a dog ran far away and then home again\n"]
    words = ("--path", checkpoint, "--score-reference", "--buffer-size", 2, "--batch-size", 2)
    printed = run("fairseq-interactive", data, *TASK, *words, text="".join(lines))
    scores = re.findall(r"^P-\d+\t(.*)$", printed, re.MULTILINE)
    for score, line in zip(model.score(lines), scores, strict=True):
        expected = [float(number) for number in line.split()]
        np.testing.assert_allclose(score.log_probs / np.log(2), expected, atol=5.1e-5)


@pytest.mark.parametrize("past_lines", [False, True])
def test_generate_equals_fairseq_interactive(data, checkpoint, model, past_lines):
    prompts = ["the cat", "a dog ran the"]
    words = ("--path", checkpoint, "--beam", 3, "--max-len-b", 22)
    words += ("--buffer-size", 2, "--batch-size", 2)
    words += ("--continue-past-eos", "--min-len", 22) if past_lines else ()
    printed = run("fairseq-interactive", data, *TASK, *words, text="\n".join(prompts))
    lines = re.findall(r"^H-\d\t(\S+)\t(.*)$", printed, re.MULTILINE)
    for prompt, (score, text) in zip(prompts, lines, strict=True):
        options = {"beam": 3, "stop_at_newline": not past_lines}
        length = 22 - len(prompt.split())
        (best, *_) = model.hypotheses(prompt, length, **options)
        assert " ".join(best.tokens) == text
        assert best.score == pytest.approx(float(score) * math.log(2), rel=1e-6)
        assert model.generate(prompt, length, **options) == best.text


def test_from_pretrained_loads_a_model(data, checkpoint, model):
    hub = AllAttentionLanguageModel.from_pretrained(
        str(checkpoint.parent), checkpoint.name, str(data)
    )
    scores = hub.score("the cat sat")["positional_scores"]
    np.testing.assert_allclose(scores.numpy(), model.score("the cat sat\n").log_probs, atol=1e-6)
    text = hub.sample("the cat", beam=2, max_len_b=9)
    assert text == model.generate("the cat", 7, beam=2, stop_at_newline=True)
