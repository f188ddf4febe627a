"""Commands of preparations, called in this process."""

import pytest

from scripts.prepare import _binarize
from tests.scripts.prepare.prepared import in_this_process


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch):
    monkeypatch.setattr(_binarize, "child_process", in_this_process)


@pytest.fixture
def call(capsys):
    """A function that runs a command's ``main``; it returns status, stdout and stderr."""

    def call(main, *words):
        try:
            status = main([str(word) for word in words])
        except SystemExit as ended:
            # of the parser
            status = ended.code
        return status, *capsys.readouterr()

    return call
