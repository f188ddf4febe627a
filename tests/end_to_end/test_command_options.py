"""Options of fairseq's commands: wrong ones are answered by a sentence, others work."""

import re

import pytest

from tests.end_to_end.commands import ALL, USER_DIR, evaluate, loss, run, train


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--fp16", "--fp16 takes a GPU, and there is none: add --fp16-no-flatten-grads"),
        ("--distributed-world-size 2", "-size is 2, which takes as many GPUs, and there is none:"),
        ("--sample-break-mode none", "--sample-break-mode: --task segment_language_modeling reads"),
        ("--arch transfomer_xl", "--arch transfomer_xl is no model: did you mean transformer"),
        ("--tokens-per-sampel 4", "--tokens-per-sampel is no option here: did you mean --tokens"),
    ],
)
def test_options_of_a_training(data, tmp_path, monkeypatch, options, sentence):
    # as where there is no GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    printed = train(data, tmp_path, "--max-update", 1, *options.split(), fails=True)
    assert re.search(f"^error: .*{re.escape(sentence)}", printed, re.MULTILINE)
    assert "Traceback" not in printed
    assert "usage:" not in printed


def test_the_task_of_an_evaluation_is_in_the_checkpoint(data, checkpoint):
    given = (*USER_DIR, "--path", checkpoint, "--gen-subset", "test", "--tokens-per-sample", 8)
    # how many softmaxes are computed at once is no matter
    printed = run("fairseq-eval-lm", data, *given, "--softmax-batch", 5)
    assert loss(printed) == loss(evaluate(data, checkpoint, "--tokens-per-sample", 8))


@pytest.mark.parametrize("options", ["--diverse-beam-groups 2", "--unkpen 1 --lenpen 0.5"])
def test_searches_continue_a_prompt(data, checkpoint, options):
    given = (*USER_DIR, "--path", checkpoint, "--beam", 4, "--nbest", 4, "--max-len-b", 9, *ALL[:2])
    printed = run("fairseq-interactive", data, *given, *options.split(), text="the cat\n")
    found = re.findall(r"^H-0\t(\S+)\t(.*)$", printed, re.MULTILINE)
    assert len(found) == 4
    assert all(text.startswith("the cat") for _, text in found)
