"""Options of fairseq's commands: what has no effect is refused, and checkpoints know their task."""

import argparse
import dataclasses

import pytest
import torch
from fairseq import options
from fairseq.dataclass.configs import GenerationConfig
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
        # fairseq's translation can
        assert getattr(parse(command, "--task", "translation", *words), option)


@pytest.mark.parametrize("option", command_options.OF_BLOCKS)
def test_options_of_blocks_are_explained(option, capsys):
    flag = "--" + option.replace("_", "-")
    with pytest.raises(SystemExit):
        parse("eval-lm", *SEGMENTS, flag, "1")
    assert f"error: {flag}: --task segment_language_modeling reads a text as it is" in (
        capsys.readouterr().err
    )


def test_the_lists_name_options_of_fairseq():
    generation = {option.name for option in dataclasses.fields(GenerationConfig)}
    assert generation >= set(command_options.REFUSED)
    blocks = {option.name for option in dataclasses.fields(LanguageModelingConfig)}
    assert blocks >= set(command_options.OF_BLOCKS)


@pytest.mark.parametrize(
    ("saved", "command", "words", "task"),
    [
        ("segment_language_modeling", "eval-lm", (), "segment_language_modeling"),
        ("segment_language_modeling", "interactive", (), "segment_language_modeling"),
        ("segment_language_modeling", "generate", SEGMENTS, "segment_language_modeling"),
        ("segment_language_modeling", "eval-lm", ("--task", "language_modeling"), None),
        # fairseq's own tasks stay as they are by default
        ("language_modeling", "interactive", (), "translation"),
        ("unknown", "eval-lm", (), "language_modeling"),
    ],
)
@pytest.mark.parametrize("parsed", [False, True])
def test_evaluation_has_the_task_of_its_checkpoint(tmp_path, saved, command, words, task, parsed):
    path, task_options = tmp_path / "checkpoint_last.pt", {"_name": saved}
    if parsed:
        task_options = argparse.Namespace(**task_options)
    torch.save({"cfg": {"task": task_options}, "model": {}}, path)
    expected = task or words[1]
    assert parse(command, *words, "--path", f"{path}:other.pt").task == expected


@pytest.mark.parametrize("content", [None, b"", b"text", b"PK\x03\x04"])
def test_a_checkpoint_that_cannot_be_read_changes_no_default(tmp_path, content):
    path = tmp_path / "checkpoint_last.pt"
    if content is not None:
        path.write_bytes(content)
    assert parse("eval-lm", "--path", path).task == "language_modeling"
