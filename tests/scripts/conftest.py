"""What the tests of scripts leave as it was, and what they share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    """Benchmarks set the number of torch's threads."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.fixture
def refused(tmp_path, capsys):
    """Check that a command says one error, from its beginning, and writes nothing."""

    def check(main, words, message):
        output = tmp_path / "refused"
        assert main([*map(str, words), "--output", str(output)]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"error: {message}")
        assert printed.err.count("\n") == 1
        assert not output.exists()

    return check
