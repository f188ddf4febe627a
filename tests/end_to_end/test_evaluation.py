"""fairseq-eval-lm counts every token once and gives the same loss whatever the segments."""

import re

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


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("checkpoint", ()),
        ("transformer_xl", ("--model-overrides", "{'mem_len': 0}", "--extended-context", 1000)),
    ],
)
def test_evaluation_scores_each_token_once_in_any_segments(
    data, name, options, test_tokens, request
):
    checkpoint, log_probs = request.getfixturevalue(name), []
    for length in (2, 100_000):
        words = ("--tokens-per-sample", length, "--output-word-probs", *options)
        printed = evaluate(data, checkpoint, *words)
        assert tokens_evaluated(printed) == test_tokens
        log_probs.append(log_probabilities(printed))
        assert len(log_probs[-1]) == test_tokens
    np.testing.assert_allclose(*log_probs, atol=5e-6)


ADAPTIVE = """--arch transformer_xl --adaptive-input --tie-adaptive-weights --ddp-backend legacy_ddp
--adaptive-input-cutoff 8,14 --adaptive-softmax-cutoff 8,14 --criterion segment_loss"""


@pytest.mark.parametrize(
    ("positions", "options"),
    [
        ("learned-absolute", "--extended-context 4 --criterion segment_loss --half-loss"),
        ("transformer-xl", f"{ADAPTIVE} --untie-r --locked-dropout --embed-dropout 0.1"),
    ],
)
def test_ablations_are_trained_and_evaluated(data, tmp_path, test_tokens, positions, options):
    model = """--arch transformer_xl_tiny --decoder-layers 2 --decoder-embed-dim 16
    --decoder-attention-heads 2 --decoder-ffn-embed-dim 24 --max-update 2 --disable-validation"""
    words = f"{model} --positions {positions} {options}".split()
    trained = train(data, tmp_path, *words, model=())
    checkpoint = tmp_path / "checkpoint_last.pt"
    context = options.split() if "--extended-context" in options else ()
    printed = evaluate(data, checkpoint, "--tokens-per-sample", 8, "--batch-size", 2, *context)
    assert tokens_evaluated(printed) == test_tokens
    mem_len = 0 if "absolute" in positions else 8
    for output in (trained, printed):
        assert f"recurrence {mem_len} tokens" in output
        assert f"positions {positions}" in output


def test_shards_together_score_each_token_once(data, checkpoint, test_tokens):
    counts = []
    for shard in (0, 1):
        options = ("--tokens-per-sample", 16, "--batch-size", 3, "--output-word-probs")
        sharding = ("--num-shards", 2, "--shard-id", shard)
        printed = evaluate(data, checkpoint, *options, *sharding)
        counts.append(tokens_evaluated(printed))
        assert len(log_probabilities(printed)) == counts[-1]
    assert sum(counts) == test_tokens


def test_evaluation_on_two_workers_is_refused(data, checkpoint, tmp_path):
    words = ("fairseq-eval-lm", data, *TASK, "--path", checkpoint, "--gen-subset", "test")
    printed = run_on_two_workers(tmp_path, *words, fails=True)
    assert "--distributed-world-size is 2" in printed
    assert "Loss (base 2)" not in printed


@pytest.mark.parametrize(
    ("context", "less"),
    [
        ("--mem-len 9", "--model-overrides {'mem_len':1}"),
        ("--mem-len 0 --extended-context 5", "--extended-context 0"),
    ],
)
def test_validation_logs_the_loss_of_an_evaluation(data, tmp_path, context, less):
    # validate in 3 streams; training has 4
    words = f"""--arch transformer_xl_tiny --decoder-embed-dim 16 --decoder-attention-heads 2
    --init-std 1.5 {context} --max-update 5 --lr 0.05 --valid-subset test --batch-size-valid 3
    --tokens-per-sample 3"""
    printed = train(data, tmp_path, *words.split(), model=())
    assert "in 3 streams, segments of 3 tokens" in printed
    (*_, logged) = re.findall(r"on 'test' subset \| loss ([\d.]+)", printed)
    # the task's option is not in the checkpoint
    _, extended, length = context.partition("--extended-context")
    checkpoint, layout = tmp_path / "checkpoint_last.pt", "--batch-size 3 --tokens-per-sample 3"
    words = (*layout.split(), *(extended + length).split())
    assert float(logged) == pytest.approx(loss(evaluate(data, checkpoint, *words)), abs=6e-4)
    # the tokens that it reads back change the loss
    shorter = loss(evaluate(data, checkpoint, *layout.split(), *less.split()))
    assert float(logged) != pytest.approx(shorter, abs=2e-3)


def test_evaluation_prints_the_loss_without_line_ends_too(data, checkpoint):
    options = ("--batch-size", 3, "--softmax-batch", 5)
    printed = evaluate(data, checkpoint, "--tokens-per-sample", 7, "--output-word-probs", *options)
    tokens = re.findall(r"(\S+) \[(-\d+\.\d+)\]", printed)
    nats = -np.mean([float(log_prob) for token, log_prob in tokens if token != "</s>"])
    (figures,) = re.findall(
        r"without line ends: ([\d.]+) bits a token, perplexity ([\d.]+) \(([\d,]+) of", printed
    )
    bits, perplexity, count = (float(number.replace(",", "")) for number in figures)
    assert bits == pytest.approx(nats / np.log(2), abs=6e-5)
    assert perplexity == pytest.approx(np.exp(nats), abs=6e-3)
    assert 0 < count == sum(token != "</s>" for token, _ in tokens) < len(tokens)
    # the headline figure includes line ends
    every = -np.mean([float(log_prob) for _, log_prob in tokens])
    assert loss(printed) == pytest.approx(every / np.log(2), abs=6e-5)


def assert_named(printed, names):
    (sentence,) = re.findall(r"^\w+Error: .*", printed, re.MULTILINE)
    assert all(name in sentence for name in names), sentence


# an error names options, their values and what to give
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--batch-size-valid 5000", ["--batch-size-valid", "5000 parallel streams"]),
        ("--criterion adaptive_loss --ddp-backend legacy_ddp", ["--criterion segment_loss"]),
        ("--valid-subset dev", ["dev.bin", "fairseq-preprocess"]),
        ("--task language_modeling", ["LanguageModelingTask"]),
        ("--arch pkm_transformer_lm_tiny", ["--arch pkm_transformer_lm", "language_modeling"]),
    ],
)
def test_training_refuses_impossible_options(data, tmp_path, options, names):
    folder, model = tmp_path / "none", () if "--arch" in options else MODEL
    words = ("--max-update", 1, *options.split())
    assert_named(train(data, folder, *words, model=model, fails=True), names)
    assert not list(folder.glob("*.pt"))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--model-overrides {'mem-len':10}", ["--model-overrides", "'mem-len'", "mem_len"]),
        ("--context-window 5", ["--context-window is 5"]),
        ("--extended-context 5", ["--extended-context is 5"]),
        ("--remove-bpe", ["--remove-bpe"]),
    ],
)
def test_evaluation_refuses_impossible_options(data, checkpoint, options, names):
    printed = evaluate(data, checkpoint, *options.split(), fails=True)
    assert_named(printed, names)
    assert "Loss (base 2)" not in printed
