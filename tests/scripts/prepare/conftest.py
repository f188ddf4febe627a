"""Run preparation commands in this process."""

import pytest

from scripts.prepare import _binarize
from tests.end_to_end.commands import run_here


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch):
    monkeypatch.setattr(_binarize, "run_child", run_here)


@pytest.fixture
def call(capsys):
    """Return a function that runs a command's ``main`` and returns status, stdout and stderr."""

    def call(main, *words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:
            # raised by the parser
            status = ended.code
        return status, *capsys.readouterr()

    return call
