"""fairseq-eval-lm counts every token once and gives the same loss whatever the segments."""

import re
import shutil

import numpy as np
import pytest

from tests.end_to_end.commands import (
    MODEL,
    TASK,
    evaluate,
    log_probabilities,
    loss,
    run_on_two_workers,
    tokens_evaluated,
    train,
)


def test_evaluation_scores_each_token_once_in_any_segments(data, transformer_xl, test_tokens):
    options = ("--model-overrides", {"mem_len": 0}, "--extended-context", 1000)
    log_probs = []
    for length in (2, 100_000):
        words = ("--tokens-per-sample", length, "--output-word-probs", *options)
        log_probs.append(log_probabilities(evaluate(data, transformer_xl, *words)))
        assert len(log_probs[-1]) == test_tokens
    np.testing.assert_allclose(*log_probs, atol=5e-6)


def test_shards_together_score_each_token_once(data, checkpoint, test_tokens):
    shards = [("--batch-size", 3, "--num-shards", 2, "--shard-id", shard) for shard in (0, 1)]
    assert sum(tokens_evaluated(evaluate(data, checkpoint, *s)) for s in shards) == test_tokens


def test_evaluation_on_two_workers_is_refused(data, checkpoint, tmp_path):
    words = ("fairseq-eval-lm", data, *TASK, "--path", checkpoint, "--gen-subset", "test")
    printed = run_on_two_workers(tmp_path, *words, fails=True)
    assert "--distributed-world-size is 2" in printed


@pytest.mark.parametrize(
    ("context", "less", "workers"),
    [
        ("--mem-len 9", "--model-overrides {'mem_len':1}", 1),
        ("--mem-len 9", "--model-overrides {'mem_len':1}", 2),
        ("--positions learned-absolute --extended-context 5", "--extended-context 0", 1),
    ],
)
def test_validation_logs_the_loss_of_an_evaluation(data, tmp_path, context, less, workers):
    # validate in 3 streams on each worker; training has 4 in all
    words = f"""--arch transformer_xl_tiny --decoder-embed-dim 16 --decoder-attention-heads 2
    --init-std 1.5 {context} --max-update 5 --lr 0.05 --valid-subset test --batch-size-valid 3
    --tokens-per-sample 3"""
    printed = train(data, tmp_path, *words.split(), model=(), workers=workers)
    (*_, logged) = re.findall(r"on 'test' subset \| loss ([\d.]+)", printed)
    # the task's option is not in the checkpoint
    _, extended, length = context.partition("--extended-context")
    checkpoint = tmp_path / "checkpoint_last.pt"
    layout = f"--batch-size {3 * workers} --tokens-per-sample 3"
    words = (*layout.split(), *(extended + length).split())
    assert float(logged) == pytest.approx(loss(evaluate(data, checkpoint, *words)), abs=6e-4)
    # the tokens that it reads back change the loss
    shorter = loss(evaluate(data, checkpoint, *layout.split(), *less.split()))
    assert float(logged) != pytest.approx(shorter, abs=2e-3)


def test_evaluation_prints_the_loss_without_line_ends_too(data, checkpoint):
    printed = evaluate(data, checkpoint, "--output-word-probs", "--batch-size", 3)
    nats = np.array(log_probabilities(printed))
    words = [token != "</s>" for token in re.findall(r"(\S+) \[-\d+\.\d{6}\]", printed)]
    (figures,) = re.findall(
        r"without line ends: ([\d.]+) bits a token, perplexity ([\d.]+) \((\d+) of", printed
    )
    bits, perplexity, count = map(float, figures)
    assert bits == pytest.approx(-nats[words].mean() / np.log(2), abs=6e-5)
    assert perplexity == pytest.approx(np.exp(-nats[words].mean()), abs=6e-3)
    assert count == sum(words) < len(words)
    # the headline figure includes line ends
    assert loss(printed) == pytest.approx(-nats.mean() / np.log(2), abs=6e-5)


def assert_named(printed, names):
    (sentence,) = re.findall(r"^\w+Error: .*", printed, re.MULTILINE)
    assert all(name in sentence for name in names), sentence


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--batch-size-valid 5000", ["--batch-size-valid", "5000 parallel streams"]),
        ("--valid-subset dev", ["dev.bin", "fairseq-preprocess"]),
        ("--arch pkm_transformer_lm_tiny", ["--arch pkm_transformer_lm", "language_modeling"]),
    ],
)
def test_training_refuses_impossible_options(data, tmp_path, options, names):
    model = () if "--arch" in options else MODEL
    printed = train(data, tmp_path, "--max-update", 1, *options.split(), model=model, fails=True)
    assert_named(printed, names)
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--model-overrides {'mem-len':10}", ["--model-overrides", "'mem-len'", "mem_len"]),
        ("--model-overrides mem_len=5", ["--model-overrides is mem_len=5", "'mem_len'"]),
        ("--model-overrides ['mem_len']", ["--model-overrides is ['mem_len']", "a dictionary"]),
        ("--context-window 5", ["--context-window is 5"]),
        ("--remove-bpe", ["--remove-bpe"]),
    ],
)
def test_evaluation_refuses_impossible_options(data, checkpoint, options, names):
    assert_named(evaluate(data, checkpoint, *options.split(), fails=True), names)


def test_evaluation_refuses_a_folder_and_translations(data, checkpoint, tmp_path):
    folder = checkpoint.parent
    names = [f"--path is {folder}, a folder", "checkpoint_best.pt"]
    assert_named(evaluate(data, folder, fails=True), names)
    pairs = tmp_path / "pairs"
    pairs.mkdir()
    for language in ("en", "de"):
        shutil.copy(data / "dict.txt", pairs / f"dict.{language}.txt")
    names = ["dict.de.txt, dict.en.txt", "--task translation", "fairseq-generate"]
    assert_named(evaluate(pairs, checkpoint, fails=True), names)


def test_evaluation_warns_of_lengths_that_training_did_not_have(data, transformer_xl):
    printed = evaluate(data, transformer_xl, "--tokens-per-sample", 7)
    (trained,) = re.findall(r"--tokens-per-sample is 7 .* was trained with (\d+)", printed)
    far = ("--model-overrides", {"mem_len": 16 * int(trained) + 1})
    assert "far beyond" in evaluate(data, transformer_xl, "--tokens-per-sample", trained, *far)
    printed = evaluate(data, transformer_xl, "--tokens-per-sample", trained)
    assert "was trained with" not in printed
    assert "far beyond" not in printed
