"""A small corpus and a model trained on it, made once a test process."""

import random
import shutil

import pytest

from tests.end_to_end.commands import run, train

WORDS = "the cat sat on a mat dog ran far away and then home again".split()


def write_corpus(folder):
    """Write train, valid and test text of short random sentences."""
    generator = random.Random(1)
    for split, lines in (("train", 150), ("valid", 25), ("test", 31)):
        sentences = [
            " ".join(generator.choices(WORDS, k=generator.randint(1, 9))) for _ in range(lines)
        ]
        (folder / f"{split}.txt").write_text("\n".join(sentences) + "\n")


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Folder of the binarized corpus; its text lies beside it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    texts = [f"--{split}pref={folder}/{split}.txt" for split in ("train", "valid", "test")]
    run("fairseq-preprocess", "--only-source", *texts, "--destdir", folder / "bin")
    return folder / "bin"


@pytest.fixture(scope="session")
def make_pairs(data, tmp_path_factory):
    """Binarize the corpus and what it is translated to: its words changed, last to first."""

    def make(source, target, *options, change=str):
        folder = tmp_path_factory.mktemp("pairs")
        for split in ("train", "valid", "test"):
            lines = (data.parent / f"{split}.txt").read_text().splitlines()
            turned = (" ".join(reversed(change(line).split())) for line in lines)
            (folder / f"{split}.{source}").write_text("\n".join(lines) + "\n")
            (folder / f"{split}.{target}").write_text("\n".join(turned) + "\n")
        texts = [f"--{split}pref={folder}/{split}" for split in ("train", "valid", "test")]
        languages = ("--source-lang", source, "--target-lang", target)
        run("fairseq-preprocess", *languages, *options, *texts, "--destdir", folder / "bin")
        return folder / "bin"

    return make


@pytest.fixture(scope="session")
def test_tokens(data):
    """Number of tokens in the test split: its words, and one </s> a line."""
    lines = (data.parent / "test.txt").read_text().splitlines()
    return sum(len(line.split()) + 1 for line in lines)


@pytest.fixture
def other_dictionary(data, tmp_path):
    """Folder of the binarized corpus with the symbols of its dictionary in another order."""
    other = shutil.copytree(data, tmp_path / "other")
    lines = (other / "dict.txt").read_text().splitlines()
    (other / "dict.txt").write_text("\n".join(lines[::-1]) + "\n")
    return other


@pytest.fixture(scope="session")
def checkpoint(data, tmp_path_factory):
    """A checkpoint of the small model after 30 updates."""
    folder = tmp_path_factory.mktemp("model")
    train(data, folder, "--max-update", 30, "--disable-validation")
    return folder / "checkpoint_last.pt"
