"""fairseq-interactive and fairseq-generate continue prompts."""

import re

import pytest

from tests.end_to_end.commands import TASK, run


def hypotheses(printed):
    return re.findall(r"^H-\d+\t\S+\t(.*)$", printed, re.MULTILINE)


def test_interactive_continues_each_prompt_to_the_end_of_its_line(data, checkpoint):
    prompts = ["the cat", "a dog ran the cat the"]
    words = ("--path", checkpoint, "--beam", 2, "--min-len", 12, "--max-len-b", 40)
    together = ("--buffer-size", 2, "--batch-size", 2)
    printed = run("fairseq-interactive", data, *TASK, *words, *together, text="\n".join(prompts))
    for prompt, text in zip(prompts, hypotheses(printed), strict=True):
        assert text.startswith(prompt)
        # the minimum length does not include the prompt
        assert len(text.split()) - len(prompt.split()) >= 12
        assert "</s>" not in text


@pytest.mark.parametrize("options", ["--diverse-beam-groups 2", "--unkpen 1 --lenpen 0.5"])
def test_interactive_takes_other_searches_and_unknown_symbols(data, checkpoint, options):
    words = ("--path", checkpoint, "--beam", 4, "--nbest", 4, "--max-len-b", 9, *options.split())
    printed = run("fairseq-interactive", data, *TASK, *words, text="the zebra\n")
    assert re.search(r"WARNING .* 1 of 2 symbols of the prompts are <unk>", printed)
    texts = hypotheses(printed)
    assert len(texts) == 4
    assert all(text.startswith("the <unk>") for text in texts)


def test_generate_continues_segments_of_a_split(data, checkpoint):
    words = ("--path", checkpoint, "--gen-subset", "test", "--beam", 2)
    segments = ("--tokens-per-sample", 8, "--batch-size", 5, "--prefix-size", 4)
    lengths = ("--continue-past-eos", "--max-len-b", 12)
    printed = run("fairseq-generate", data, *TASK, *words, *segments, *lengths)
    targets = re.findall(r"^T-\d+\t(.*)$", printed, re.MULTILINE)
    texts = hypotheses(printed)
    assert len(targets) == len(texts) > 0
    for target, hypothesis in zip(targets, texts, strict=True):
        assert hypothesis.split()[:4] == target.split()[:4] or len(target.split()) < 4
        # fairseq does not print a final </s>
        assert len(hypothesis.split()) in (11, 12)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", "--continue-past-eos"),
        ("--max-len-b 20 --tokens-per-sample 20 --continue-past-eos", "--max-len-b is 20"),
        ("--match-source-len --continue-past-eos", "--match-source-len"),
    ],
)
def test_generate_refuses_impossible_options(data, checkpoint, options, named):
    words = ("--path", checkpoint, "--gen-subset", "test", "--beam", 2, "--batch-size", 5)
    printed = run("fairseq-generate", data, *TASK, *words, *options.split(), fails=True)
    assert named in re.search(r"^ValueError: .*", printed, re.MULTILINE)[0]


def test_generate_scores_each_token_of_a_reference_once(data, checkpoint, test_tokens):
    words = ("--path", checkpoint, "--gen-subset", "test", "--score-reference")
    printed = run("fairseq-generate", data, *TASK, *words, "--batch-size", 3)
    scores = re.findall(r"^P-\d+\t(.*)$", printed, re.MULTILINE)
    assert sum(len(line.split()) for line in scores) == test_tokens
    texts = re.findall(r"^[ST]-\d+\t(.*)$", printed, re.MULTILINE)
    assert len(texts) == 2 * len(scores)
    # without --continue-past-eos, fairseq leaves ends of lines out
    assert not any("</s>" in text for text in texts)
