"""fairseq's commands refuse options without effect, and take the task from the checkpoint."""

import argparse

import pytest
import torch
from fairseq import options
from fairseq.tasks.language_modeling import LanguageModelingConfig

import fairseq_plugins  # noqa: F401 (changes how fairseq parses)
from fairseq_plugins.fairseq_integration import command_options

SEGMENTS = ("--task", "segment_language_modeling")
GIVEN = {"constraints": ("--constraints", "ordered"), "print_alignment": ("--print-alignment",)}
PARSERS = {
    "eval-lm": options.get_eval_lm_parser,
    "generate": options.get_generation_parser,
    "interactive": options.get_interactive_generation_parser,
}


def parse(command, *words):
    return options.parse_args_and_arch(PARSERS[command](), ["data", *map(str, words)])


@pytest.mark.parametrize("option", command_options.REFUSED)
def test_what_segment_language_models_cannot_do_is_refused(option):
    flag = "--" + option.replace("_", "-")
    words = GIVEN.get(option, (flag, "align") if option == "replace_unk" else (flag,))
    for command in ("generate", "interactive"):
        with pytest.raises(ValueError, match=f"^{flag} with --task segment_language_modeling: .*"):
            parse(command, *SEGMENTS, *words)
        # fairseq's translation accepts it
        assert getattr(parse(command, "--task", "translation", *words), option)


@pytest.mark.parametrize("option", command_options.OF_BLOCKS)
def test_options_of_blocks_are_explained(option, capsys):
    assert option in LanguageModelingConfig.__dataclass_fields__
    flag = "--" + option.replace("_", "-")
    with pytest.raises(SystemExit):
        parse("eval-lm", *SEGMENTS, flag, "1")
    assert f"error: {flag}: --task segment_language_modeling reads a text as it is" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("saved", "command", "words", "task"),
    [
        (SEGMENTS[1], "eval-lm", (), SEGMENTS[1]),
        (SEGMENTS[1], "interactive", (), SEGMENTS[1]),
        (SEGMENTS[1], "generate", SEGMENTS, SEGMENTS[1]),
        (SEGMENTS[1], "eval-lm", ("--task", "language_modeling"), "language_modeling"),
        # for fairseq's own tasks, the default task stays
        ("language_modeling", "interactive", (), "translation"),
        ("unknown", "eval-lm", (), "language_modeling"),
    ],
)
def test_evaluation_has_the_task_of_its_checkpoint(tmp_path, saved, command, words, task):
    path = tmp_path / "checkpoint_last.pt"
    for task_options in ({"_name": saved}, argparse.Namespace(_name=saved)):
        torch.save({"cfg": {"task": task_options}, "model": {}}, path)
        assert parse(command, *words, "--path", f"{path}:other.pt").task == task


def test_a_checkpoint_that_cannot_be_read_changes_no_default(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    assert parse("eval-lm", "--path", path).task == "language_modeling"
    for content in (b"", b"text", b"PK\x03\x04"):
        path.write_bytes(content)
        assert parse("eval-lm", "--path", path).task == "language_modeling"
