"""Prepare corpora in this process."""

from copy import deepcopy

import pytest

from scripts.prepare import _binarize
from scripts.prepare.__main__ import main
from scripts.prepare._corpora import read_yaml
from tests.end_to_end.commands import run_here


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch):
    monkeypatch.setattr(_binarize, "run_child", run_here)


@pytest.fixture
def corpora(monkeypatch):
    """Return the declarations of all corpora, to be changed by a test."""
    declared = read_yaml("corpora.yaml")
    for name, corpus in deepcopy(declared).items():
        monkeypatch.setitem(declared, name, corpus)
    return declared


@pytest.fixture
def prepare(call, tmp_path):
    """Return a function that prepares a corpus in the folder ``out``."""
    return lambda name, *words: call(main, name, "--output", tmp_path / "out", *words)
