"""What the tests of scripts share."""

import re

import pytest


@pytest.fixture
def refused(tmp_path, capsys):
    """Check that a command says one error, by a pattern of its beginning, and writes nothing."""

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
