"""fairseq-interactive and fairseq-generate continue prompts."""

import re

import pytest

from tests.end_to_end.commands import TASK, run


def hypotheses(printed):
    return re.findall(r"^H-\d+\t\S+\t(.*)$", printed, re.MULTILINE)


def test_interactive_takes_other_searches_and_unknown_symbols(data, checkpoint):
    search = "--beam 4 --nbest 4 --max-len-b 9 --diverse-beam-groups 2 --unkpen 1 --lenpen 0.5"
    words = ("fairseq-interactive", data, *TASK, "--path", checkpoint, *search.split())
    printed = run(*words, text="the zebra\n")
    assert re.search(r"WARNING .* 1 of 2 symbols of the prompts are <unk>", printed)
    texts = hypotheses(printed)
    assert len(texts) == 4
    assert all(text.startswith("the <unk>") for text in texts)


def generate(data, checkpoint, *options, fails=False):
    words = ("--path", checkpoint, "--gen-subset", "test", "--beam", 2, "--batch-size", 5)
    return run("fairseq-generate", data, *TASK, *words, *options, fails=fails)


def test_generate_continues_segments_of_a_split(data, checkpoint):
    segments = ("--tokens-per-sample", 8, "--prefix-size", 4)
    printed = generate(data, checkpoint, *segments, "--continue-past-eos", "--max-len-b", 12)
    targets = re.findall(r"^T-\d+\t(.*)$", printed, re.MULTILINE)
    for target, hypothesis in zip(targets, hypotheses(printed), strict=True):
        assert hypothesis.split()[:4] == target.split()[:4] or len(target.split()) < 4
        # fairseq does not print a final </s>
        assert len(hypothesis.split()) in (11, 12)
    assert targets


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", "--continue-past-eos"),
        ("--max-len-b 20 --tokens-per-sample 20 --continue-past-eos", "--max-len-b is 20"),
        ("--match-source-len --continue-past-eos", "--match-source-len"),
    ],
)
def test_generate_refuses_impossible_options(data, checkpoint, options, named):
    printed = generate(data, checkpoint, *options.split(), fails=True)
    assert named in re.search(r"^ValueError: .*", printed, re.MULTILINE)[0]


def test_generate_scores_each_token_of_a_reference_once(data, checkpoint, test_tokens):
    printed = generate(data, checkpoint, "--score-reference")
    scores = re.findall(r"^P-\d+\t(.*)$", printed, re.MULTILINE)
    assert sum(len(line.split()) for line in scores) == test_tokens
    texts = re.findall(r"^[ST]-\d+\t(.*)$", printed, re.MULTILINE)
    assert len(texts) == 2 * len(scores)
    # without --continue-past-eos, fairseq leaves ends of lines out
    assert not any("</s>" in text for text in texts)
