"""Transformer-XL through fairseq's commands: losses, ablations, generation, scoring."""

import re
from itertools import pairwise

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
from tests.end_to_end.conftest import TRANSFORMER_XL

COVERING = "{'mem_len': 1000}"


def test_loss_of_every_token_is_the_same_for_all_segment_lengths(data, transformer_xl, test_tokens):
    found = []
    for length in (1, 7, 100_000):
        options = ("--tokens-per-sample", length, "--output-word-probs")
        printed = evaluate(data, transformer_xl, *options, "--model-overrides", COVERING)
        assert tokens_evaluated(printed) == test_tokens
        found.append(log_probabilities(printed))
        assert len(found[-1]) == test_tokens
    for one, other in pairwise(found):
        np.testing.assert_allclose(one, other, atol=3e-6)


def test_memory_clamp_and_same_length_are_changed_at_evaluation_and_logged(data, transformer_xl):
    options = ("--tokens-per-sample", 7, "--batch-size", 2)
    plain = evaluate(data, transformer_xl, *options)
    assert "recurrence 8 tokens, clamp none, same length no, positions transformer-xl" in plain
    found = {loss(plain)}
    for overrides, said in [
        ("{'mem_len': 3}", "recurrence 3 tokens, clamp none, same length no"),
        ("{'clamp_len': 2, 'same_length': True}", "recurrence 8 tokens, clamp 2, same length yes"),
    ]:
        printed = evaluate(data, transformer_xl, *options, "--model-overrides", overrides)
        assert said in printed
        found.add(loss(printed))
    assert len(found) == 3


def test_extended_context_makes_the_loss_independent_of_segments_and_streams(
    data, transformer_xl, test_tokens
):
    found = []
    for length, streams in ((1000, 1), (7, 5)):
        options = ("--tokens-per-sample", length, "--batch-size", streams)
        context = ("--extended-context", 1000, "--model-overrides", "{'mem_len': 0}")
        printed = evaluate(data, transformer_xl, *options, *context)
        assert tokens_evaluated(printed) == test_tokens
        assert f"segments of {length} tokens after 1000 of context" in printed
        found.append(loss(printed))
    assert len(set(found)) == 1
    assert found[0] == loss(evaluate(data, transformer_xl, "--model-overrides", COVERING))


ABLATIONS = [
    ("--positions", "sinusoidal-absolute", "--criterion", "segment_loss", "--half-loss"),
    ("--positions", "learned-absolute", "--extended-context", 4),
    ("--positions", "shaw", "--decoder-normalize-before", "--checkpoint-activations"),
    ("--mem-len", 0, "--untie-r", "--locked-dropout", "--embed-dropout", 0.1),
]


@pytest.mark.parametrize("options", ABLATIONS)
def test_ablations_train_and_evaluate(data, tmp_path, test_tokens, options):
    short = ("--max-update", 15, "--disable-validation")
    trained = train(data, tmp_path, *short, *options, model=TRANSFORMER_XL)
    checkpoint = tmp_path / "checkpoint_last.pt"
    context = options[2:] if "--extended-context" in options else ()
    printed = evaluate(data, checkpoint, "--tokens-per-sample", 8, "--batch-size", 2, *context)
    assert tokens_evaluated(printed) == test_tokens
    positions = "transformer-xl" if options[0] != "--positions" else options[1]
    memory = 8 if positions == "shaw" else 0
    for said in (trained, printed):
        assert f"recurrence {memory} tokens" in said
        assert f"positions {positions}" in said


def test_sentences_are_scored_one_by_one(data, transformer_xl, tmp_path):
    sentences = ["the cat sat", "mat", "a dog ran far away and then home again"]
    found = {}
    scored = run(
        "fairseq-interactive",
        *(data, *TASK, "--path", transformer_xl, "--score-reference", "--buffer-size", 3),
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
    printed = evaluate(tmp_path / "bin", transformer_xl, "--output-word-probs")
    expected = np.array(log_probabilities(printed)) / np.log(2)
    np.testing.assert_allclose(found[len(sentences) - 1], expected, atol=2e-4)
