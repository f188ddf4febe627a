"""fairseq-interactive and fairseq-generate continue prompts."""

import re

import pytest

from tests.end_to_end.commands import TASK, run


def hypotheses(printed):
    """Return the generated texts in order."""
    return re.findall(r"^H-\d+\t\S+\t(.*)$", printed, re.MULTILINE)


def test_interactive_continues_each_prompt_to_the_end_of_its_line(data, checkpoint):
    printed = run(
        "fairseq-interactive",
        data,
        *TASK,
        *("--path", checkpoint, "--beam", 3, "--max-len-b", 30),
        *("--buffer-size", 2, "--batch-size", 2),
        text="the cat\na dog ran\n",
    )
    first, second = hypotheses(printed)
    assert first.startswith("the cat")
    assert second.startswith("a dog ran")
    assert "</s>" not in first + second


@pytest.mark.parametrize("temperature", [1, 0.02])
def test_sampling_goes_on_past_the_end_of_a_line(data, checkpoint, temperature):
    words = ("--path", checkpoint, "--sampling", "--sampling-topk", 5, "--beam", 1, "--nbest", 1)
    words += ("--temperature", temperature)
    lengths = ("--min-len", 60, "--max-len-b", 60, "--continue-past-eos", "--seed", 1)
    printed = run("fairseq-interactive", data, *TASK, *words, *lengths, text="the cat\n")
    (sample,) = hypotheses(printed)
    assert len(sample.split()) == 60
    assert sample.startswith("the cat")


def test_the_least_length_counts_what_follows_each_prompt(data, checkpoint):
    prompts = ["the cat", "a dog ran the cat the"]
    words = ("--path", checkpoint, "--beam", 2, "--min-len", 12, "--max-len-b", 40)
    together = ("--buffer-size", 2, "--batch-size", 2)
    printed = run("fairseq-interactive", data, *TASK, *words, *together, text="\n".join(prompts))
    for prompt, found in zip(prompts, hypotheses(printed), strict=True):
        assert found.startswith(prompt)
        assert len(found.split()) - len(prompt.split()) >= 12


def test_generate_continues_segments_of_a_split(data, checkpoint):
    words = ("--path", checkpoint, "--gen-subset", "test", "--beam", 2)
    segments = ("--tokens-per-sample", 8, "--batch-size", 5, "--prefix-size", 4)
    lengths = ("--continue-past-eos", "--max-len-b", 12)
    printed = run("fairseq-generate", data, *TASK, *words, *segments, *lengths)
    targets = re.findall(r"^T-\d+\t(.*)$", printed, re.MULTILINE)
    found = hypotheses(printed)
    assert len(targets) == len(found) > 0
    for target, hypothesis in zip(targets, found, strict=True):
        assert hypothesis.split()[:4] == target.split()[:4] or len(target.split()) < 4
        assert len(hypothesis.split()) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "a prompt holds </s>, which ends generation: give --continue-past-eos"),
        (
            ("--max-len-b", 20, "--tokens-per-sample", 20, "--continue-past-eos"),
            "--max-len-b is 20: prompts of 20 tokens, which count too, leave nothing",
        ),
        (
            ("--match-source-len", "--continue-past-eos"),
            "--match-source-len with --task segment_language_modeling: ",
        ),
    ],
)
def test_generation_that_cannot_be_is_refused(data, checkpoint, options, message):
    words = ("--path", checkpoint, "--gen-subset", "test", "--beam", 2, "--batch-size", 5)
    assert message in run("fairseq-generate", data, *TASK, *words, *options, fails=True)


def test_generate_scores_given_text(data, checkpoint, test_tokens):
    words = ("--path", checkpoint, "--gen-subset", "test", "--score-reference")
    printed = run("fairseq-generate", data, *TASK, *words, "--batch-size", 3)
    scores = re.findall(r"^P-\d+\t(.*)$", printed, re.MULTILINE)
    assert sum(len(line.split()) for line in scores) == test_tokens
