"""Data, and a short training of each paper."""

import shutil

import pytest

from tests.end_to_end.commands import run
from tests.end_to_end.conftest import data, made_once, make_pairs  # noqa: F401 (fixtures)
from tests.robustness.trainings import TRAININGS, training


@pytest.fixture(scope="session")
def corpora(data, make_pairs):  # noqa: F811
    """Folders of a binarized text and of binarized pairs with one dictionary."""
    return {"text": data, "pairs": make_pairs("en", "de", "--joined-dictionary")}


@pytest.fixture(scope="session")
def trained(corpora, tmp_path_factory):
    """Folder of each paper's training of 8 updates; checkpoint_1_4.pt has half of them."""
    folder = tmp_path_factory.mktemp("trained")
    for paper in TRAININGS:
        words = ("--max-update", 8, "--save-interval-updates", 4)
        run(*training(corpora, paper, folder / paper, *words))
    return folder


@pytest.fixture
def model(trained, tmp_path):
    """A copy of the Transformer-XL's folder of checkpoints."""
    return shutil.copytree(trained / "transformer_xl", tmp_path / "model")
