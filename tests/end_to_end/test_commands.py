"""fairseq's commands as a user types them, one process each: text to model to its results."""

import re

import pytest

from tests.end_to_end.commands import (
    ALL,
    LIMIT,
    TASK,
    USER_DIR,
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


def test_a_language_model_from_text_to_continuations(data, tmp_path, test_tokens):
    texts = [f"--{split}pref={data.parent}/{split}.txt" for split in ("train", "valid", "test")]
    typed("fairseq-preprocess", "--only-source", *texts, "--destdir", tmp_path / "bin")
    corpora = {"text": tmp_path / "bin"}
    typed(*training_command(corpora, "transformer_xl", tmp_path, "--max-update", 3))
    checkpoint = tmp_path / "checkpoint_last.pt"
    printed = typed(*evaluation_command(tmp_path / "bin", checkpoint))
    assert tokens_evaluated(printed) == test_tokens
    assert 2 < loss(printed) < 6
    words = ("--path", checkpoint, "--beam", 2, "--max-len-b", 9)
    printed = typed("fairseq-interactive", tmp_path / "bin", *TASK, *words, text="the cat\n")
    assert re.search(r"^H-0\t\S+\tthe cat", printed, re.MULTILINE)


@pytest.mark.slow
def test_a_translation_model_from_training_to_translations(corpora, pairs, trained):
    checkpoint = trained("weighted_transformer") / "checkpoint_last.pt"
    options = ("--task", "translation", "--path", checkpoint, "--cpu", "--max-tokens", 200, *ALL)
    printed = typed("fairseq-validate", pairs, *USER_DIR, *options)
    assert re.search(r"\bloss [\d.]+", printed)
    printed = typed(*translation_command(pairs, checkpoint))
    assert len(re.findall(r"^H-\d+\t", printed, re.MULTILINE)) == 31
