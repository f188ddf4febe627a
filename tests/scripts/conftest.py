"""Fixtures shared by the tests of scripts."""

import multiprocessing
import os
import re
import select

import pytest


@pytest.fixture
def assert_end_together(tmp_path):
    """Check that a script's child process, which holds a pipe, ends as the script is killed."""

    def check(run_script):
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        script = multiprocessing.get_context("fork").Process(target=run_script, args=(fifo,))
        script.start()
        with fifo.open("rb") as held:
            script.kill()
            script.join()
            assert select.select([held], [], [], 60)[0]
            assert held.read() == b""

    return check


@pytest.fixture
def refused(tmp_path, capsys):
    """Check that a command prints one error, whose start matches a pattern, and writes nothing."""

    def check(main, words, message):
        capsys.readouterr()
        output = tmp_path / "refused"
        assert main([*map(str, words), "--output", str(output)]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert re.match(f"error: {message}", printed.err), printed.err
        assert printed.err.count("\n") == 1
        assert list(tmp_path.glob("refused*")) == []

    return check
