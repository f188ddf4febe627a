"""A small corpus and models trained on it, made once for all the test processes of a run."""

import fcntl
import os
import random
import shutil

import pytest

from tests.end_to_end.commands import MODEL, run, train

WORDS = "the cat sat on a mat dog ran far away and then home again".split()
# weights of the published size would leave so small a model indifferent to its past
TRANSFORMER_XL = (
    *("--arch", "transformer_xl_tiny", "--decoder-layers", 2, "--decoder-embed-dim", 16),
    *("--decoder-attention-heads", 2, "--decoder-ffn-embed-dim", 24, "--init-std", 0.3),
)
SPANS = (
    *(*MODEL, "--adaptive-span", "--attention-span", 24, "--span-ramp", 4, "--span-init", 0.2),
    *("--criterion", "segment_loss", "--span-loss", 0.001),
)


def write_corpus(folder):
    """Write train, valid and test text of short random sentences."""
    generator = random.Random(1)
    for split, lines in (("train", 150), ("valid", 25), ("test", 31)):
        sentences = [
            " ".join(generator.choices(WORDS, k=generator.randint(1, 9))) for _ in range(lines)
        ]
        (folder / f"{split}.txt").write_text("\n".join(sentences) + "\n")


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Make a folder by a function, unless another test process has made it in this run."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    def made(name, make):
        folder, done = base / f"{name}-shared", base / f"{name}.done"
        with (base / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                # what a failure left
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return made


@pytest.fixture(scope="session")
def data(made_once):
    """Folder of the binarized corpus; its text lies beside it."""

    def make(folder):
        write_corpus(folder)
        texts = [f"--{split}pref={folder}/{split}.txt" for split in ("train", "valid", "test")]
        run("fairseq-preprocess", "--only-source", *texts, "--destdir", folder / "bin")

    return made_once("corpus", make) / "bin"


@pytest.fixture(scope="session")
def make_pairs(data, made_once):
    """Binarize the corpus and what it is translated to: its words changed, last to first."""

    def make(source, target, *options, change=str):
        def binarize(folder):
            for split in ("train", "valid", "test"):
                lines = (data.parent / f"{split}.txt").read_text().splitlines()
                turned = (" ".join(reversed(change(line).split())) for line in lines)
                (folder / f"{split}.{source}").write_text("\n".join(lines) + "\n")
                (folder / f"{split}.{target}").write_text("\n".join(turned) + "\n")
            texts = [f"--{split}pref={folder}/{split}" for split in ("train", "valid", "test")]
            languages = ("--source-lang", source, "--target-lang", target)
            run("fairseq-preprocess", *languages, *options, *texts, "--destdir", folder / "bin")

        return made_once("".join([source, target, *options]), binarize) / "bin"

    return make


@pytest.fixture(scope="session")
def pairs(make_pairs):
    """Folder of a binarized translation task with one dictionary: the same words, last to first."""
    return make_pairs("en", "de", "--joined-dictionary")


@pytest.fixture(scope="session")
def test_tokens(data):
    """Number of tokens in the test split: its words, and one </s> a line."""
    lines = (data.parent / "test.txt").read_text().splitlines()
    return sum(len(line.split()) + 1 for line in lines)


def trained(data, made_once, name, **how):
    """The last checkpoint of a small model after 20 updates."""
    short = ("--max-update", 20, "--disable-validation")
    return made_once(name, lambda folder: train(data, folder, *short, **how)) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def checkpoint(data, made_once):
    """A checkpoint of all-attention, whose span is 12 tokens."""
    return trained(data, made_once, "all_attention")


@pytest.fixture(scope="session")
def transformer_xl(data, made_once):
    """A checkpoint of a Transformer-XL, whose memory is 8 tokens."""
    return trained(data, made_once, "transformer_xl", model=TRANSFORMER_XL)


@pytest.fixture(scope="session")
def with_spans(data, made_once):
    """A checkpoint of all-attention whose heads learned spans of up to 24 tokens."""
    return trained(data, made_once, "with_spans", model=SPANS)
