"""Fixtures shared by the tests of scripts."""

import re

import pytest

from tests.scripts.refusals import refused


@pytest.fixture
def call(capsys):
    """Return a function that runs a command's ``main`` and returns status, stdout and stderr."""

    def call(main, *words):
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:
            # raised by the parser
            status = ended.code
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def check_refusal(tmp_path, call):
    """Check that a command prints one error, whose start matches a pattern, and writes nothing."""

    def check(main, words, message):
        status, printed, error = call(main, *words, "--output", tmp_path / "refused")
        assert refused((status, printed, error)), error
        assert printed == ""
        assert re.match(f"error: {message}", error), error
        assert list(tmp_path.glob("refused*")) == []

    return check
