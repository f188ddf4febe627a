"""Child processes, and printed commands that can be pasted."""

import subprocess

import pytest

from scripts._shared import commands


def test_a_command_gets_its_input_and_its_output_is_logged(tmp_path):
    commands.run_child(["cat"], tmp_path / "log", "caf\u00e9\n")
    assert (tmp_path / "log").read_text(encoding="utf-8") == "caf\u00e9\n"


def test_a_command_that_fails_names_its_log(tmp_path):
    with pytest.raises(ValueError, match=r"sh ended with exit status 3: .*log"):
        commands.run_child(["sh", "-c", "exit 3"], tmp_path / "log")


def test_printed_command_can_be_pasted():
    words = ["fairseq-train", "a folder/bin", "--lr", "0.003", *["--option", "a b"] * 20, "--flag"]
    printed = commands.format_command(words)
    shell = ["sh", "-c", f"printf '%s\\n' {printed}"]
    output = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == words
