"""Folders of texts and models that several files measure."""

import pytest

from tests.scripts.evaluate.saved_memory_models import write_all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder for a file's text and models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A text, pairs of sentences, and models with memories of each kind; nobody changes them."""
    return write_all(tmp_path_factory.mktemp("memories"))
