"""fairseq-interactive and fairseq-generate continue prompts."""

import re

import pytest

from tests.end_to_end.commands import TASK, run


def hypotheses(printed):
    return re.findall(r"^H-\d+\t\S+\t(.*)$", printed, re.MULTILINE)


def test_each_prompt_is_continued_to_the_end_of_its_line(data, checkpoint):
    prompts = ["the cat", "a dog ran the cat the"]
    words = ("--path", checkpoint, "--beam", 2, "--min-len", 12, "--max-len-b", 40)
    together = ("--buffer-size", 2, "--batch-size", 2)
    printed = run("fairseq-interactive", data, *TASK, *words, *together, text="\n".join(prompts))
    for prompt, found in zip(prompts, hypotheses(printed), strict=True):
        assert found.startswith(prompt)
        # the minimum length does not include the prompt
        assert len(found.split()) - len(prompt.split()) >= 12
        assert "</s>" not in found


@pytest.mark.parametrize("options", ["--diverse-beam-groups 2", "--unkpen 1 --lenpen 0.5"])
def test_other_searches_continue_a_prompt(data, checkpoint, options):
    words = ("--path", checkpoint, "--beam", 4, "--nbest", 4, "--max-len-b", 9, *options.split())
    printed = run("fairseq-interactive", data, *TASK, *words, text="the zebra\n")
    assert re.search(r"WARNING .* 1 of 2 symbols of the prompts are <unk>", printed)
    found = hypotheses(printed)
    assert len(found) == 4
    assert all(text.startswith("the <unk>") for text in found)


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
        # fairseq does not print a final </s>
        assert len(hypothesis.split()) in (11, 12)


def numbered_hypotheses(printed):
    """Return number and text of each hypothesis, and the scores, in order of these."""
    lines = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed, re.MULTILINE)
    lines.sort(key=lambda line: (int(line[0]), line[2]))
    return [(int(number), text) for number, _, text in lines], [float(line[1]) for line in lines]


@pytest.mark.parametrize("beam", [1, 2])
def test_prompts_of_unequal_length_get_what_each_gets_alone(data, transformer_xl, beam):
    prompts = "the\nthe cat sat\na dog ran the cat\nhome again\n"
    words = ("--path", transformer_xl, "--beam", beam, "--nbest", beam, "--continue-past-eos")
    words += ("--max-len-b", 12, "--buffer-size", 4)
    (texts, scores), (texts_alone, scores_alone) = (
        numbered_hypotheses(
            run("fairseq-interactive", data, *TASK, *words, "--batch-size", size, text=prompts)
        )
        for size in (4, 1)
    )
    assert len(texts) == 4 * beam
    assert texts == texts_alone
    assert scores == pytest.approx(scores_alone, abs=1e-5)


@pytest.mark.parametrize("prefix", [3, 8])
def test_streams_without_a_token_get_no_hypothesis(data, transformer_xl, test_tokens, prefix):
    # in the last segment some streams have one token, and the others none
    streams, segment = next(
        (streams, segment)
        for streams in range(8, 1, -1)
        for segment in range(8, test_tokens // streams + 1)
        if test_tokens % streams and test_tokens // streams % segment == 0
    )
    words = ("--path", transformer_xl, "--gen-subset", "test", "--beam", 2, "--continue-past-eos")
    words += ("--tokens-per-sample", segment, "--batch-size", streams)
    printed = run(
        "fairseq-generate", data, *TASK, *words, "--prefix-size", prefix, "--max-len-b", 40
    )
    targets = re.findall(r"^T-(\d+)\t(.*)$", printed, re.MULTILINE)
    texts, _ = numbered_hypotheses(printed)
    assert sorted(int(number) for number, _ in targets) == [number for number, _ in texts]
    assert len(texts) == test_tokens // segment // streams * streams + test_tokens % streams
    # fairseq prints a target that is </s> as nothing
    assert "Generate test with beam=2" in printed


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("", "--continue-past-eos"),
        ("--max-len-b 20 --tokens-per-sample 20 --continue-past-eos", "--max-len-b is 20"),
        ("--match-source-len --continue-past-eos", "--match-source-len"),
    ],
)
def test_generation_that_cannot_be_is_refused(data, checkpoint, options, named):
    words = ("--path", checkpoint, "--gen-subset", "test", "--beam", 2, "--batch-size", 5)
    printed = run("fairseq-generate", data, *TASK, *words, *options.split(), fails=True)
    assert named in re.search(r"^ValueError: .*", printed, re.MULTILINE)[0]


def test_generate_scores_given_text(data, checkpoint, test_tokens):
    words = ("--path", checkpoint, "--gen-subset", "test", "--score-reference")
    printed = run("fairseq-generate", data, *TASK, *words, "--batch-size", 3)
    scores = re.findall(r"^P-\d+\t(.*)$", printed, re.MULTILINE)
    assert sum(len(line.split()) for line in scores) == test_tokens
