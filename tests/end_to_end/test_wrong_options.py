"""What users run into in fairseq's commands is answered by a sentence that says what to do."""

import pytest

from tests.end_to_end.commands import evaluate, train


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--fp16"], "error: --fp16 takes a GPU, and there is none: add --fp16-no-flatten-grads"),
        (["--fp16", "--cpu"], "error: --fp16 takes a GPU, and --cpu is given: add --fp16-no-"),
        (
            ["--distributed-world-size", 2],
            "error: --distributed-world-size is 2, which takes as many GPUs, and there is none: ",
        ),
        (
            ["--distributed-world-size", 2, "--cpu"],
            "error: --distributed-world-size is 2, which takes as many GPUs, and --cpu is given: ",
        ),
        (
            ["--sample-break-mode", "none"],
            "error: --sample-break-mode: --task segment_language_modeling reads a text as it is",
        ),
        (["--arch", "transfomer_xl"], "error: --arch transfomer_xl is no model: did you mean tran"),
        (["--tokens-per-sampel", 4], "--tokens-per-sampel is no option here: did you mean --token"),
        (["--nonsense"], "error: --nonsense is no option here\n"),
    ],
)
def test_options_of_a_training(data, tmp_path, monkeypatch, options, sentence):
    # as where there is no GPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    printed = train(data, tmp_path, "--max-update", 1, *options, fails=True)
    assert sentence in printed
    assert "Traceback" not in printed
    assert "usage:" not in printed


def test_an_option_of_the_model_in_an_evaluation(data, checkpoint):
    printed = evaluate(data, checkpoint, "--mem-len", 64, fails=True)
    sentence = "error: --mem-len is an option of the model: to change it in a trained one, give "
    assert f"{sentence}--model-overrides \"{{'mem_len': VALUE}}\"" in printed
    assert "usage:" not in printed
