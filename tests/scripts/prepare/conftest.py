"""Commands of preparations, called in this process."""

import pytest

from scripts.prepare import _binarize
from tests.scripts.prepare.preprocess_in_process import in_this_process


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch):
    monkeypatch.setattr(_binarize, "child_process", in_this_process)


@pytest.fixture
def call(capsys):
    """A function that runs a command's ``main``; it returns status, stdout and stderr."""

    def call(main, *words):
        status = main([str(word) for word in words])
        return status, *capsys.readouterr()

    return call
