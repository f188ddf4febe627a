import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from scripts._shared import commands as run_command


@pytest.mark.parametrize(
    ("before", "ended_by", "patience", "again"),
    # enough for a shell to end on a machine with other work; Ctrl-C comes once more
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
    # of a background job of a shell, which Ctrl-C does not reach
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with run_command.child_process(["sh", "-c", f"exec sleep 600 > {fifo}"]):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of such an end")
def test_a_command_ends_with_the_script_that_is_killed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = multiprocessing.get_context("fork").Process(target=run_without_end, args=(fifo,))
    script.start()
    with fifo.open("rb") as held_by_command:
        script.kill()
        script.join()
        assert select.select([held_by_command], [], [], 60)[0]
        assert held_by_command.read() == b""


def test_printed_command_can_be_pasted():
    words = ["fairseq-train", "a folder/bin", "--lr", "0.003", *["--option", "a b"] * 20, "--flag"]
    printed = run_command.format_command(words)
    shell = ["sh", "-c", f"printf '%s\\n' {printed}"]
    read = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    assert read.splitlines() == words
