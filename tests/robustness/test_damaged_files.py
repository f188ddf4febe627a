"""Damaged and wrong files are refused by name, or read correctly."""

import os
import random
import re
import shutil

import pytest

from tests.end_to_end.commands import Command, evaluation_command, run
from tests.end_to_end.trainings import assert_refused, training_command


def flip(content, at):
    """Flip a bit at a relative position in the content."""
    changed = bytearray(content)
    place = int(at * (len(content) - 1))
    changed[place] ^= 1 << random.Random(at).randrange(8)
    return bytes(changed)


DAMAGES = {
    "empty": lambda content: b"",
    "cut in the middle": lambda content: content[: len(content) // 2],
    "without its last byte": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\x01",
    "text": lambda content: b"not what it should be\n",
    "a bit flipped in its head": lambda content: flip(content, 0.1),
    "a bit flipped in its middle": lambda content: flip(content, 0.5),
}
DICTIONARIES = {
    "a symbol less": lambda content: content[: content[:-1].rindex(b"\n") + 1],
    "twenty symbols more": lambda content: content + b"".join(b"more%d 1\n" % n for n in range(20)),
    "another text's": lambda content: b"".join(b"other%d 9\n" % n for n in range(40)),
    "another order": lambda content: b"\n".join(content.splitlines()[::-1]) + b"\n",
}
# fairseq's format has no checksum: these may change a symbol into another one, undetected
UNSEEN = {("test.bin", name) for name in DAMAGES if name.startswith("a bit flipped")}
PLACES = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a FIFO": os.mkfifo,
}


def results(printed, path):
    """Return what an evaluation printed, for comparison."""
    loss = re.search(r"Evaluated ([\d,]+) tokens.*?Loss \(base 2\): ([\d.]+)", printed, re.DOTALL)
    assert loss, printed[-2000:]
    return loss.groups()


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "cut in the middle", "without its last byte", "text"])
def test_a_cut_checkpoint(damage, model, corpora):
    """fairseq's commands end with torch's error, convert.average names the file."""
    path = model / "checkpoint_last.pt"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    status, printed = Command(*evaluation_command(corpora["text"], path)).wait()
    assert status > 0
    assert "Loss" not in printed
    mean = path.with_name("average.pt")
    words = ("scripts.convert.average", path, path.with_name("checkpoint_1_4.pt"))
    assert_refused(*Command(*words, "--output", mean).wait(), path.name)
    assert not mean.exists()


@pytest.mark.parametrize("paper", ["product_key_memory", "weighted_transformer"])
def test_the_checkpoint_of_another_model(paper, corpora, trained, model):
    path = model / "checkpoint_last.pt"
    shutil.copy(trained(paper) / path.name, path)
    words = training_command(corpora, "transformer_xl", model, "--max-update", 21)
    assert_refused(*Command(*words).wait(), "Missing key|size mismatch|dictionary")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((name, damage) for name in ("test.bin", "test.idx", "dict.txt") for damage in DAMAGES),
        *(("dict.txt", damage) for damage in (*DICTIONARIES, *PLACES)),
        # not a folder, for which fairseq's own traceback names the file
        *(("test.bin", damage) for damage in ("missing", "a FIFO")),
        *(("test.idx", damage) for damage in PLACES),
    ],
)
def test_damaged_data(name, damage, corpora, trained, tmp_path):
    data = shutil.copytree(corpora["text"], tmp_path / "data")
    path = data / name
    content = path.read_bytes()
    if damage in PLACES:
        path.unlink()
        PLACES[damage](path)
    else:
        path.write_bytes((DAMAGES | DICTIONARIES)[damage](content))
    checkpoint = trained("transformer_xl") / "checkpoint_last.pt"
    status, printed = Command(*evaluation_command(data, checkpoint)).wait()
    if status:
        assert_refused(status, printed, name.split(".")[0])
    elif (name, damage) not in UNSEEN:
        assert damage not in PLACES
        expected = run(*evaluation_command(corpora["text"], checkpoint))
        assert results(printed, path) == results(expected, path)
