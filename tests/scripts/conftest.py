"""What the tests of scripts leave as it was."""

import pytest
import torch


@pytest.fixture(autouse=True)
def threads():
    """Benchmarks set the number of torch's threads."""
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)
