"""fairseq's commands as a user types them, one process each: text to model to its results."""

import re

import pytest

from tests.end_to_end.commands import (
    ALL,
    LIMIT,
    TASK,
    USER_DIR,
    evaluation_command,
    run,
    start,
    tokens_evaluated,
)
from tests.end_to_end.trainings import (
    EXACT,
    assert_equal,
    parameters,
    training_command,
    translation_command,
)


def typed(*words, text=None):
    """Run a command in a process of its own; return what it printed."""
    process = start(*words)
    printed, _ = process.communicate(text, timeout=LIMIT)
    assert process.returncode == 0, printed[-4000:]
    return printed


def test_a_typed_training_is_the_one_of_this_process(data, tmp_path):
    weights = []
    for name, command in (("typed", typed), ("called", run)):
        folder, options = tmp_path / name, ("--max-update", 3)
        command(*training_command({"text": data}, "transformer_xl", folder, *options))
        weights.append(parameters(folder))
    assert_equal(*weights, **EXACT)


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
