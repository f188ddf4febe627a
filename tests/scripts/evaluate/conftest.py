"""Texts and models that several test files measure."""

import pytest

from tests.scripts.evaluate.saved_memory_models import write_all
from tests.scripts.evaluate.saved_models import write_checkpoint, write_text


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def text(folder):
    return write_text(folder / "bin", 60)


@pytest.fixture(scope="session")
def models(folder, text):
    """Write two models with a memory; return a third one, which reads at most 12 tokens."""
    window = {"mem_len": 5, "same_length": True, "clamp_len": 7}
    write_checkpoint(folder / "xl.pt", "transformer_xl", **window)
    write_checkpoint(folder / "aa.pt", "all_attention_lm")
    absolute = {"positions": "sinusoidal-absolute", "mem_len": 0, "extended_context": 4}
    return write_checkpoint(folder / "abs.pt", "transformer_xl", **absolute)


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Write a text, sentence pairs, and models with memories of each kind; do not change them."""
    return write_all(tmp_path_factory.mktemp("memories"))
