"""fairseq's commands as a user types them, one process each: text to model to its results."""

import re

import pytest

from tests.end_to_end.commands import (
    ALL,
    LIMIT,
    TASK,
    USER_DIR,
    evaluate,
    evaluation_command,
    loss,
    start,
    tokens_evaluated,
)
from tests.end_to_end.trainings import training_command, translation_command


def typed(*words, text=None):
    """Run a command in a process of its own; return what it printed."""
    process = start(*words)
    printed, _ = process.communicate(text, timeout=LIMIT)
    assert process.returncode == 0, printed[-4000:]
    return printed


def test_a_typed_training_learns_from_a_text(data, tmp_path):
    typed(*training_command({"text": data}, "transformer_xl", tmp_path, "--max-update", 3))
    assert 2 < loss(evaluate(data, tmp_path / "checkpoint_last.pt")) < 6


@pytest.mark.slow
def test_other_commands_as_typed(data, pairs, trained, tmp_path, test_tokens):
    text = f"--testpref={data.parent}/test.txt", f"--srcdict={data}/dict.txt"
    typed("fairseq-preprocess", "--only-source", *text, "--destdir", tmp_path)
    checkpoint = trained("transformer_xl") / "checkpoint_last.pt"
    assert tokens_evaluated(typed(*evaluation_command(tmp_path, checkpoint))) == test_tokens
    words = ("--path", checkpoint, "--beam", 2, "--max-len-b", 9)
    printed = typed("fairseq-interactive", tmp_path, *TASK, *words, text="the cat\n")
    assert re.search(r"^H-0\t\S+\tthe cat", printed, re.MULTILINE)
    checkpoint = trained("weighted_transformer") / "checkpoint_last.pt"
    options = ("--task", "translation", "--path", checkpoint, "--cpu", "--max-tokens", 200, *ALL)
    printed = typed("fairseq-validate", pairs, *USER_DIR, *options)
    assert re.search(r"\bloss [\d.]+", printed)
    printed = typed(*translation_command(pairs, checkpoint))
    assert len(re.findall(r"^H-\d+\t", printed, re.MULTILINE)) == 31
