"""Options and error messages of commands, their child processes, and atomic writes."""

import importlib.util
import logging
import math
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from scripts._shared import commands as run_command
from scripts._shared.checkpoints import load_checkpoint
from scripts._shared.command_line import (
    NamedFile,
    check_at_least,
    exit_status,
    parse_named_files,
    parse_numbers,
)
from scripts._shared.files import atomic_write
from scripts._shared.results import prepare_results, save_plot
from tests.scripts.evaluate.saved_models import write_checkpoint


def test_checkpoints_have_labels_or_are_called_by_their_path(tmp_path):
    odd = tmp_path / "a=b.pt"
    odd.touch()
    assert parse_named_files("--checkpoint", ["XL=x.pt", str(tmp_path / "y.pt"), str(odd)]) == [
        NamedFile("XL", (tmp_path.cwd() / "x.pt")),
        NamedFile(str(tmp_path / "y.pt"), tmp_path / "y.pt"),
        NamedFile(str(odd), odd),
    ]
    with pytest.raises(ValueError, match="--checkpoint has 'XL' more than once: "):
        parse_named_files("--checkpoint", ["XL=x.pt", "XL=y.pt"])


def test_numbers_rise_and_differ():
    assert parse_numbers("--step", "30,4,30", int, 0, math.inf) == [4, 30]
    assert parse_numbers("--ratios", "1,0.5", float, 0, 1) == [0.5, 1.0]
    for text, kind in (("3,,4", int), ("0,3", int), ("3,9", int), ("nan", float)):
        with pytest.raises(ValueError, match=f"--step is '{text}': give numbers from 1 to 8"):
            parse_numbers("--step", text, kind, 1, 8)
    check_at_least(1, stride=1, max_tokens=None)
    with pytest.raises(ValueError, match="--batch-size is 0: it must be at least 1"):
        check_at_least(1, stride=1, batch_size=0)


@pytest.mark.parametrize(
    ("error", "status", "named"),
    [
        (ValueError("--step is 0"), 1, ["error: --step is 0"]),
        (FloatingPointError("not finite"), 1, ["error: not finite"]),
        (OSError(28, "No space", "plot.png"), 1, ["--output out: ", "plot.png", "make room"]),
        (KeyboardInterrupt(), 130, ["interrupted; what is done is kept"]),
    ],
)
def test_errors_and_ctrl_c_are_one_line(capsys, error, status, named):
    assert exit_status(Mock(side_effect=error), "what is done is kept", Path("out")) == status
    (line,) = capsys.readouterr().err.split("\n")[-2:-1]
    assert all(words in line for words in named)


def test_a_command_hides_the_debugging_messages_that_importing_fairseq_lets_through(caplog):
    def work():
        logging.getLogger().setLevel(logging.DEBUG)
        logging.getLogger("matplotlib.font_manager").debug("a font")
        logging.getLogger("matplotlib.font_manager").warning("no font")

    level = logging.getLogger().level
    try:
        assert exit_status(work) == 0
    finally:
        logging.getLogger().setLevel(level)
    assert [record.message for record in caplog.records] == ["no font"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_kill_ends_a_command_as_ctrl_c_does_unless_nohup_set_it_aside(number, capsys):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert exit_status(lambda: signal.raise_signal(number), "what is done is kept") == 130
        assert capsys.readouterr().err == "\ninterrupted; what is done is kept\n"
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert exit_status(lambda: signal.raise_signal(number)) == 0
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("before", "ended_by", "patience", "again"),
    # seconds for a shell to end on a busy machine; whether Ctrl-C comes a second time
    [("", signal.SIGINT, 1.5, False), ("trap '' INT; ", signal.SIGKILL, 0.5, True)],
)
def test_interrupted_command_is_ended_and_waited_for(
    tmp_path, monkeypatch, before, ended_by, patience, again
):
    monkeypatch.setattr(run_command, "PATIENCE", patience)
    log = tmp_path / "log"
    words = ["sh", "-c", f"{before}echo ready; while :; do sleep 0.05; done"]
    started = []

    def interrupted():
        with run_command.child_process(words, log) as child:
            started.append(child)
            while not log.read_text():
                time.sleep(0.01)
            if again:
                main = threading.main_thread().ident
                threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert started[0].returncode == -ended_by


def run_without_end(fifo):
    # like a background job of a shell, which ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with run_command.child_process(["sh", "-c", f"exec sleep 600 > {fifo}"]):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of such an end")
def test_a_command_ends_with_the_script_that_is_killed(assert_end_together):
    assert_end_together(run_without_end)


def test_printed_command_can_be_pasted():
    words = ["fairseq-train", "a folder/bin", "--lr", "0.003", *["--option", "a b"] * 20, "--flag"]
    printed = run_command.format_command(words)
    shell = ["sh", "-c", f"printf '%s\\n' {printed}"]
    read = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert read.splitlines() == words


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_fails_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half():
        with atomic_write(path) as partial:
            partial.write_text("ne")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert (names(tmp_path), path.read_text()) == (["file"], "old")
    # left by a killed run
    (tmp_path / "file.partial").write_text("a longer text")
    with atomic_write(path) as partial:
        partial.write_text("new")
    assert (names(tmp_path), path.read_text()) == (["file"], "new")


def test_a_plot_without_matplotlib_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for refused in (
        lambda: prepare_results(tmp_path / "output"),
        lambda: save_plot(tmp_path / "plot.png", lambda axes: None),
    ):
        with pytest.raises(ValueError, match="is not installed: pip install matplotlib"):
            refused()
    assert list(tmp_path.iterdir()) == []


def test_only_a_segment_language_model_is_loaded(tmp_path):
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl")
    assert load_checkpoint(tmp_path / "xl.pt")["optimizer_history"][-1]["num_updates"] == 1
    other = {"cfg": {"model": {"_name": "transformer_lm"}}}
    for name, content in (("'transformer_lm'", other), ("None", {"cfg": None}), ("None", [1])):
        torch.save(content, tmp_path / "other.pt")
        message = f"other.pt holds the model {name}, which is not a segment language model"
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path / "other.pt")
