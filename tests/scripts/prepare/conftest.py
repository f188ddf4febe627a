"""Run preparation commands in this process."""

import pytest

from scripts.prepare import _binarize
from tests.end_to_end.commands import run_here


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch):
    monkeypatch.setattr(_binarize, "run_child", run_here)
