"""Child processes of scripts."""

import pytest

from scripts._shared import commands


def test_a_command_gets_its_input_and_its_output_is_logged(tmp_path):
    commands.run_child(["cat"], tmp_path / "log", "caf\u00e9\n")
    assert (tmp_path / "log").read_text(encoding="utf-8") == "caf\u00e9\n"


def test_a_command_that_fails_names_its_log(tmp_path):
    with pytest.raises(ValueError, match=r"sh ended with exit status 3: .*log"):
        commands.run_child(["sh", "-c", "exit 3"], tmp_path / "log")
