"""Fixtures shared by the tests of scripts."""

import re

import pytest


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
