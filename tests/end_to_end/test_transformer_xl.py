"""Transformer-XL through fairseq's commands: losses, ablations, generation, scoring."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.end_to_end.commands import (
    TASK,
    evaluate,
    log_probabilities,
    loss,
    run,
    tokens_evaluated,
    train,
)

SIZE = ("--arch", "transformer_xl_tiny", "--decoder-layers", 2, "--decoder-embed-dim", 16)
# weights of the published size would leave so small a model indifferent to its past
INIT = ("--decoder-ffn-embed-dim", 24, "--init-std", 0.3)
MODEL = (*SIZE, "--decoder-attention-heads", 2, *INIT)
COVERING = "{'mem_len': 1000}"


def train_xl(data, folder, *options, **how):
    """Train a small Transformer-XL for 15 updates of 4 streams in segments of 8."""
    short = ("--max-update", 15, "--disable-validation")
    return train(data, folder, *short, *options, model=MODEL, **how)


@pytest.fixture(scope="module")
def recurrent(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recurrent")
    train_xl(data, folder)
    return folder / "checkpoint_last.pt"


def test_loss_of_every_token_is_the_same_for_all_segment_lengths(data, recurrent, test_tokens):
    found = []
    for length in (1, 7, 100_000):
        options = ("--tokens-per-sample", length, "--output-word-probs")
        printed = evaluate(data, recurrent, *options, "--model-overrides", COVERING)
        assert tokens_evaluated(printed) == test_tokens
        found.append(log_probabilities(printed))
        assert len(found[-1]) == test_tokens
    for one, other in pairwise(found):
        np.testing.assert_allclose(one, other, atol=3e-6)


def test_the_plain_kernel_trains_and_scores_what_the_fast_one_does(data, recurrent, tmp_path):
    train_xl(data, tmp_path, "--attention-kernel", "plain")
    trained = [
        torch.load(path, weights_only=True)["model"]
        for path in (recurrent, tmp_path / "checkpoint_last.pt")
    ]
    torch.testing.assert_close(*trained, atol=1e-4, rtol=1e-4)
    found = []
    for kernel in ("fast", "plain"):
        overrides = ("--model-overrides", f"{{'attention_kernel': '{kernel}'}}")
        printed = evaluate(data, recurrent, "--output-word-probs", *overrides)
        found.append(log_probabilities(printed))
    np.testing.assert_allclose(*found, atol=3e-6)


def test_memory_clamp_and_same_length_are_changed_at_evaluation_and_logged(data, recurrent):
    options = ("--tokens-per-sample", 7, "--batch-size", 2)
    plain = evaluate(data, recurrent, *options)
    assert "recurrence 8 tokens, clamp none, same length no, positions transformer-xl" in plain
    found = {loss(plain)}
    for overrides, said in [
        ("{'mem_len': 3}", "recurrence 3 tokens, clamp none, same length no"),
        ("{'clamp_len': 2, 'same_length': True}", "recurrence 8 tokens, clamp 2, same length yes"),
    ]:
        printed = evaluate(data, recurrent, *options, "--model-overrides", overrides)
        assert said in printed
        found.add(loss(printed))
    assert len(found) == 3


def test_extended_context_makes_the_loss_independent_of_segments_and_streams(
    data, recurrent, test_tokens
):
    found = []
    for length, streams in ((1000, 1), (7, 5)):
        options = ("--tokens-per-sample", length, "--batch-size", streams)
        context = ("--extended-context", 1000, "--model-overrides", "{'mem_len': 0}")
        printed = evaluate(data, recurrent, *options, *context)
        assert tokens_evaluated(printed) == test_tokens
        assert f"segments of {length} tokens after 1000 of context" in printed
        found.append(loss(printed))
    assert len(set(found)) == 1
    assert found[0] == loss(evaluate(data, recurrent, "--model-overrides", COVERING))


def test_extended_context_with_a_memory_is_refused(data, recurrent):
    printed = evaluate(data, recurrent, "--extended-context", 5, fails=True)
    assert "--extended-context is 5 for a model with a recurrence of 8 tokens" in printed
    printed = evaluate(data, recurrent, "--extended-context", -1, fails=True)
    assert "--extended-context is -1: it must be at least 0" in printed


ABLATIONS = [
    ("--positions", "sinusoidal-absolute", "--criterion", "segment_loss", "--half-loss"),
    ("--positions", "learned-absolute", "--extended-context", 4),
    ("--positions", "shaw", "--decoder-normalize-before", "--checkpoint-activations"),
    ("--mem-len", 0, "--untie-r", "--locked-dropout", "--embed-dropout", 0.1),
]


@pytest.mark.parametrize("options", ABLATIONS)
def test_ablations_train_and_evaluate(data, tmp_path, test_tokens, options):
    trained = train_xl(data, tmp_path, *options)
    checkpoint = tmp_path / "checkpoint_last.pt"
    context = options[2:] if "--extended-context" in options else ()
    printed = evaluate(data, checkpoint, "--tokens-per-sample", 8, "--batch-size", 2, *context)
    assert tokens_evaluated(printed) == test_tokens
    positions = "transformer-xl" if options[0] != "--positions" else options[1]
    memory = 8 if positions == "shaw" else 0
    for said in (trained, printed):
        assert f"recurrence {memory} tokens" in said
        assert f"positions {positions}" in said


def test_half_loss_with_adaptive_softmax_trains_on_half_the_tokens(data, tmp_path):
    bands = ("--adaptive-input-cutoff", "8,14", "--adaptive-softmax-cutoff", "8,14")
    # the preset ties plain embeddings, which bands exclude
    model = ("--arch", "transformer_xl", *MODEL[2:])
    options = ("--adaptive-input", *bands, "--tie-adaptive-weights", "--tie-adaptive-proj")
    factors = ("--adaptive-input-factor", 2, "--adaptive-softmax-factor", 2, "--output-bias")
    how = ("--ddp-backend", "legacy_ddp", "--log-interval", 1, "--max-update", 2)
    words = {}
    for half in ([], ["--half-loss"]):
        chosen = (*options, *factors, *how, "--criterion", "segment_loss", *half)
        printed = train(data, tmp_path / str(half), *chosen, "--disable-validation", model=model)
        words[str(half)] = float(re.search(r"wpb=([\d.]+)", printed)[1])
    assert list(words.values()) == [32, 16]


def test_other_tasks_are_refused(data, tmp_path):
    how = (
        "--tokens-per-sample",
        8,
        "--batch-size",
        4,
        "--optimizer",
        "sgd",
        "--save-dir",
        tmp_path,
    )
    words = (data, *TASK[:2], "--task", "language_modeling", *MODEL, *how)
    printed = run("fairseq-train", *words, fails=True)
    assert "the task is LanguageModelingTask, which keeps no states of the segments" in printed


@pytest.mark.parametrize("search", [("--beam", 3), ("--beam", 1, "--sampling")])
def test_generation_continues_a_prompt(data, recurrent, search):
    lengths = ("--continue-past-eos", "--min-len", 30, "--max-len-b", 30, "--nbest", 1)
    words = (data, *TASK, "--path", recurrent, *search, *lengths)
    printed = run("fairseq-interactive", *words, text="the cat\n")
    hypothesis = re.search(r"^H-0\t[^\t]*\t(.*)$", printed, re.MULTILINE)[1].split()
    assert hypothesis[:2] == ["the", "cat"]
    assert len(hypothesis) == 30


def test_sentences_are_scored_one_by_one(data, recurrent, tmp_path):
    sentences = ["the cat sat", "mat", "a dog ran far away and then home again"]
    found = {}
    scored = run(
        "fairseq-interactive",
        *(data, *TASK, "--path", recurrent, "--score-reference", "--buffer-size", 3),
        *("--batch-size", 3),
        text="".join(f"{s}\n" for s in sentences),
    )
    for number, sentence in enumerate(sentences):
        said = re.search(rf"^H-{number}\t([^\t]*)\t(.*)$", scored, re.MULTILINE)
        found[number] = re.search(rf"^P-{number}\t(.*)$", scored, re.MULTILINE)[1].split()
        found[number] = [float(f) for f in found[number]]
        assert said[2] == sentence
        assert len(found[number]) == len(sentence.split()) + 1
        assert float(said[1]) == pytest.approx(np.mean(found[number]), abs=2e-4)
    # the last one as a text of its own
    (tmp_path / "text").write_text(f"{sentences[-1]}\n")
    texts = ("--testpref", tmp_path / "text", "--srcdict", data / "dict.txt")
    run("fairseq-preprocess", "--only-source", *texts, "--destdir", tmp_path / "bin")
    printed = evaluate(tmp_path / "bin", recurrent, "--output-word-probs")
    expected = np.array(log_probabilities(printed)) / np.log(2)
    np.testing.assert_allclose(found[len(sentences) - 1], expected, atol=2e-4)
