"""fairseq-eval-lm counts every token once and gives the same loss whatever the segments."""

import re

import numpy as np
import pytest

from tests.end_to_end.commands import (
    TASK,
    evaluate,
    log_probabilities,
    loss,
    run,
    tokens_evaluated,
    train,
)


def test_loss_of_every_token_is_the_same_for_all_segment_lengths(data, checkpoint, test_tokens):
    found = {}
    for length in (1, 7, 64, 100_000):
        printed = evaluate(data, checkpoint, "--tokens-per-sample", length, "--output-word-probs")
        assert tokens_evaluated(printed) == test_tokens
        found[length] = log_probabilities(printed)
        assert len(found[length]) == test_tokens
    for length in (1, 7, 64):
        np.testing.assert_allclose(found[length], found[100_000], atol=3e-6)


def test_a_shorter_memory_changes_the_loss(data, checkpoint):
    short = evaluate(
        data, checkpoint, "--tokens-per-sample", 7, "--model-overrides", "{'mem_len': 2}"
    )
    assert loss(short) != loss(evaluate(data, checkpoint, "--tokens-per-sample", 7))


@pytest.mark.parametrize(("streams", "length", "shards"), [(1, 7, 2), (5, 16, 1), (3, 16, 3)])
def test_shards_together_score_every_token(data, checkpoint, test_tokens, streams, length, shards):
    counts = []
    for shard in range(shards):
        options = ("--tokens-per-sample", length, "--batch-size", streams, "--output-word-probs")
        sharding = ("--num-shards", shards, "--shard-id", shard)
        printed = evaluate(data, checkpoint, *options, *sharding)
        assert "recurrence 12 tokens, clamp none, same length no, attention span 12" in printed
        assert f"segments of {length} tokens" in printed
        counts.append(tokens_evaluated(printed))
        assert len(log_probabilities(printed)) == counts[-1]
    assert sum(counts) == test_tokens


def test_adaptive_input_and_softmax_train_and_evaluate(data, tmp_path, test_tokens):
    bands = ("--adaptive-input-cutoff", "8,14", "--adaptive-softmax-cutoff", "8,14")
    factors = ("--adaptive-input-factor", 2, "--adaptive-softmax-factor", 2)
    tied = ("--adaptive-input", "--tie-adaptive-weights", "--tie-adaptive-proj")
    criterion = ("--criterion", "segment_loss", "--ddp-backend", "legacy_ddp")
    options = (*bands, *factors, *tied, *criterion, "--max-update", 20)
    printed = train(data, tmp_path, *options, "--valid-subset", "test")
    checkpoint = tmp_path / "checkpoint_last.pt"
    result = evaluate(data, checkpoint, "--tokens-per-sample", 8, "--batch-size", 4)
    assert tokens_evaluated(result) == test_tokens
    # the loss that training logged of the same tokens, rounded there to three places
    logged = re.findall(r"on 'test' subset \| loss ([\d.]+)", printed)
    assert float(logged[-1]) == pytest.approx(loss(result), abs=6e-4)


@pytest.mark.parametrize(
    ("mem_len", "as_evaluated"),
    [
        (1, ("--model-overrides", "{'mem_len': 6}")),
        (0, ("--extended-context", 5)),
    ],
)
def test_validation_in_shorter_segments_reads_as_far_back(data, tmp_path, mem_len, as_evaluated):
    sizes = ("--decoder-embed-dim", 16, "--decoder-attention-heads", 2, "--init-std", 0.5)
    model = ("--arch", "transformer_xl_tiny", *sizes, "--mem-len", mem_len)
    # three streams and segments of 3, in place of four and 8
    validation = ("--valid-subset", "test", "--batch-size-valid", 3, "--tokens-per-sample-valid", 3)
    printed = train(data, tmp_path, *validation, "--max-update", 20, model=model)
    assert "in 3 streams, segments of 3 tokens" in printed
    checkpoint = tmp_path / "checkpoint_last.pt"
    layout = ("--tokens-per-sample", 3, "--batch-size", 3)
    expected = loss(evaluate(data, checkpoint, *layout, *as_evaluated))
    logged = re.findall(r"on 'test' subset \| loss ([\d.]+)", printed)
    assert float(logged[-1]) == pytest.approx(expected, abs=6e-4)
    # what it reads matters
    assert float(logged[-1]) != pytest.approx(loss(evaluate(data, checkpoint, *layout)), abs=2e-3)


@pytest.mark.parametrize(
    "options", [(), ("--batch-size", 3, "--softmax-batch", 5), ("--softmax-temperature", 1.3)]
)
def test_the_figures_without_line_ends_are_printed_beside_the_loss(data, checkpoint, options):
    options = ("--tokens-per-sample", 7, "--output-word-probs", *options)
    printed = evaluate(data, checkpoint, *options)
    tokens = re.findall(r"(\S+) \[(-\d+\.\d+)\]", printed)
    nats = -np.mean([float(found) for token, found in tokens if token != "</s>"])
    (said,) = re.findall(
        r"without line ends: ([\d.]+) bits a token, perplexity ([\d.]+) \(([\d,]+) of", printed
    )
    bits, perplexity, count = (float(number.replace(",", "")) for number in said)
    assert bits == pytest.approx(nats / np.log(2), abs=6e-5)
    assert perplexity == pytest.approx(np.exp(nats), abs=6e-3)
    assert 0 < count == sum(token != "</s>" for token, _ in tokens) < len(tokens)
    # the headline counts them
    every = -np.mean([float(found) for _, found in tokens])
    assert loss(printed) == pytest.approx(every / np.log(2), abs=6e-5)


BAD_TRAININGS = [
    (["--batch-size-valid", 5000], "that makes 5000 parallel streams of a split with"),
    (["--batch-split", 5], "--batch-split is 5 and --batch-size 4: a part has at least one stream"),
    (
        ["--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp"],
        "use --criterion segment_loss",
    ),
    (["--valid-subset", "dev"], "dev.bin: name the folder that fairseq-preprocess wrote"),
    (["--task", "language_modeling"], "the task is LanguageModelingTask, which keeps no states"),
]


@pytest.mark.parametrize(("options", "message"), BAD_TRAININGS)
def test_a_training_that_cannot_be_is_refused(data, tmp_path, options, message):
    assert message in train(data, tmp_path / "none", *options, fails=True)
    assert not list((tmp_path / "none").glob("*.pt"))


BAD_EVALUATIONS = [
    (["--mem-len", 64], "--mem-len is an option of the model: to change it in a trained one, give"),
    (
        ["--model-overrides", "{'mem-len': 10}"],
        "names 'mem-len', which evaluation cannot change: did you mean mem_len?",
    ),
    (["--context-window", 5], "--context-window is 5: the recurrence is the context here"),
    (["--extended-context", 5], "--extended-context is 5 for a model with a recurrence of"),
    (["--remove-bpe"], "--post-process (--remove-bpe) is"),
]


@pytest.mark.parametrize(("options", "message"), BAD_EVALUATIONS)
def test_an_evaluation_that_cannot_be_is_refused(data, checkpoint, options, message):
    printed = evaluate(data, checkpoint, *options, fails=True)
    assert message in printed
    assert "Loss (base 2)" not in printed


def test_evaluation_takes_the_task_of_the_checkpoint(data, checkpoint):
    words = (*TASK[:2], "--path", checkpoint, "--gen-subset", "test", "--tokens-per-sample", 16)
    assert loss(run("fairseq-eval-lm", data, *words)) == loss(
        evaluate(data, checkpoint, "--tokens-per-sample", 16)
    )


def test_streams_shorter_than_a_segment_are_said(data, checkpoint):
    printed = evaluate(data, checkpoint, "--tokens-per-sample", 64, "--batch-size", 8)
    assert "no stream is longer than a segment of 64 tokens" in printed
    assert "no stream is longer" not in evaluate(data, checkpoint, "--tokens-per-sample", 64)


def test_another_dictionary_is_refused(other_dictionary, checkpoint):
    printed = evaluate(other_dictionary, checkpoint, fails=True)
    assert "was trained with another dictionary than the source dictionary of DATA" in printed
