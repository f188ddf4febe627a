"""A small corpus and a model of each paper, made once for all test processes of a run."""

import fcntl
import os
import random
import shutil

import pytest

from tests.end_to_end.commands import run
from tests.end_to_end.trainings import training_command

WORDS = "the cat sat on a mat dog ran far away and then home again".split()


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Return a function that makes a folder, unless another test process of the run has made it."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def made(name, make):
        folder, done = base / f"{name}-shared", base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                # left by a failure
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def data(made_once):
    """Return the folder of a binarized corpus of random sentences; its text is one folder up."""

    def make(folder):
        generator = random.Random(1)
        for split, lines in (("train", 150), ("valid", 25), ("test", 31)):
            sentences = [
                " ".join(generator.choices(WORDS, k=generator.randint(1, 9))) for _ in range(lines)
            ]
            (folder / f"{split}.txt").write_text("\n".join(sentences) + "\n")
        texts = [f"--{split}pref={folder}/{split}.txt" for split in ("train", "valid", "test")]
        run("fairseq-preprocess", "--only-source", *texts, "--destdir", folder / "bin")

    return made_once("corpus", make) / "bin"


@pytest.fixture(scope="session")
def pairs(data, made_once):
    """Return the folder of a binarized task that reverses sentences, with one dictionary."""

    def make(folder):
        for split in ("train", "valid", "test"):
            lines = (data.parent / f"{split}.txt").read_text().splitlines()
            turned = (" ".join(reversed(line.split())) for line in lines)
            (folder / f"{split}.en").write_text("\n".join(lines) + "\n")
            (folder / f"{split}.de").write_text("\n".join(turned) + "\n")
        texts = [f"--{split}pref={folder}/{split}" for split in ("train", "valid", "test")]
        languages = ("--source-lang", "en", "--target-lang", "de", "--joined-dictionary")
        run("fairseq-preprocess", *languages, *texts, "--destdir", folder / "bin")

    return made_once("pairs", make) / "bin"


@pytest.fixture(scope="session")
def corpora(data, pairs):
    """Return the folders of data by the names that trainings use."""
    return {"text": data, "pairs": pairs}


@pytest.fixture(scope="session")
def test_tokens(data):
    """Return the number of tokens in the test split: its words, and one </s> per line."""
    lines = (data.parent / "test.txt").read_text().splitlines()
    return sum(len(line.split()) + 1 for line in lines)


@pytest.fixture(scope="session")
def trained(corpora, made_once):
    """Return a function from a paper to the folder of its training: 20 updates, saved every 4."""

    def find(paper):
        def make(folder):
            words = ("--max-update", 20, "--save-interval-updates", 4)
            (folder / "log").write_text(run(*training_command(corpora, paper, folder, *words)))

        return made_once(paper, make)

    return find


@pytest.fixture(scope="session")
def checkpoint(trained):
    """Return a checkpoint of all-attention, whose spans are at most 12 tokens."""
    return trained("all_attention") / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def transformer_xl(trained):
    """Return a checkpoint of a Transformer-XL, whose memory is 12 tokens."""
    return trained("transformer_xl") / "checkpoint_last.pt"
