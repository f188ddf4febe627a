"""Child processes end with the command, and printed commands can be pasted."""

import subprocess
import time

import pytest

from scripts._shared import commands


@pytest.mark.parametrize("patience", [5, 0.5])
def test_an_interrupted_command_is_ended_and_waited_for(tmp_path, monkeypatch, patience):
    monkeypatch.setattr(commands, "PATIENCE", patience)
    log, started = tmp_path / "log", []
    # one that ignores Ctrl-C is killed
    ignore = "trap '' INT; " if patience < 1 else ""
    words = ["sh", "-c", f"{ignore}echo ready; while :; do sleep 0.05; done"]

    def interrupted():
        with commands.child_process(words, log) as child:
            started.append(child)
            while not log.read_text():
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started[0].returncode < 0


def test_a_command_that_fails_names_its_log(tmp_path):
    with (
        pytest.raises(ValueError, match=r"sh ended with exit status 3: .*log"),
        commands.child_process(["sh", "-c", "exit 3"], tmp_path / "log"),
    ):
        pass


def test_printed_command_can_be_pasted():
    words = ["fairseq-train", "a folder/bin", "--lr", "0.003", *["--option", "a b"] * 20, "--flag"]
    printed = commands.format_command(words)
    shell = ["sh", "-c", f"printf '%s\\n' {printed}"]
    output = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == words
