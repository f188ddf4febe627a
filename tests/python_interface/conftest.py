"""Saved models of each kind, with random weights; tests do not change them."""

import pytest

from fairseq_plugins import load
from tests.scripts.evaluate.saved_memory_models import write_all
from tests.scripts.evaluate.saved_models import write_checkpoint


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Call ``write_all``, and write segment models that differ in how far back they read."""
    folder = write_all(tmp_path_factory.mktemp("saved"))
    kinds = {
        "recurrent": {"mem_len": 5},
        "same_length": {"mem_len": 5, "same_length": True},
        "zeros": {"mem_len": 5, "zero_past": True},
        "forgetful": {"mem_len": 0},
        "absolute": {"positions": "sinusoidal-absolute", "mem_len": 0, "extended_context": 4},
    }
    for name, options in kinds.items():
        write_checkpoint(folder / f"{name}.pt", "transformer_xl", **options)
    write_checkpoint(folder / "spans.pt", "all_attention_lm", attention_span=6)
    return folder


@pytest.fixture(scope="module")
def models(saved):
    """Return a function that loads a model by its kind, once."""
    loaded = {}

    def get(kind):
        if kind not in loaded:
            data = saved / ("pairs" if kind == "pairs" else "text")
            loaded[kind] = load(saved / f"{kind}.pt", data)
        return loaded[kind]

    return get
