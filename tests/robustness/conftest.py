"""The data and trainings of the end-to-end tests."""

import shutil

import pytest

from tests.end_to_end.conftest import (  # noqa: F401 (fixtures)
    corpora,
    data,
    made_once,
    pairs,
    trained,
)


@pytest.fixture
def model(trained, tmp_path):  # noqa: F811
    """Return a copy of the Transformer-XL's folder of checkpoints."""
    return shutil.copytree(trained("transformer_xl"), tmp_path / "model")
