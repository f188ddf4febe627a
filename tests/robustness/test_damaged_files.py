"""Damaged and wrong files are refused by name, or read correctly."""

import os
import random
import re
import shutil

import pytest
import torch

from tests.end_to_end.commands import Command, evaluation_command, run
from tests.end_to_end.trainings import assert_refused, logged, read_tensors, training_command


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
WEIGHT = "decoder.layers.1.self_attn.out_proj.weight"


def change_checkpoint(path, change):
    if change in DAMAGES:
        path.write_bytes(DAMAGES[change](path.read_bytes()))
        return
    state = torch.load(path, weights_only=True)
    if change == "a NaN":
        state["model"][WEIGHT].view(-1)[:1].fill_(float("nan"))
    else:
        del state["model"][WEIGHT]
    torch.save(state, path)


READERS = {
    "fairseq-eval-lm": lambda path, corpora: evaluation_command(corpora["text"], path),
    "fairseq-train": lambda path, corpora: training_command(
        *(corpora, "transformer_xl", path.parent, "--max-update", 21)
    ),
    "convert.average": lambda path, corpora: (
        *("scripts.convert.average", path, path.with_name("checkpoint_1_4.pt")),
        *("--output", path.with_name("average.pt")),
    ),
}


def results(printed, path):
    """Return what a command printed and wrote beside a checkpoint, for comparison."""
    loss = re.search(r"Evaluated ([\d,]+) tokens.*?Loss \(base 2\): ([\d.]+)", printed, re.DOTALL)
    average = path.with_name("average.pt")
    written = read_tensors(average) if average.exists() else {}
    values = {name: tensor.flatten().tolist() for name, tensor in written.items()}
    found = loss and loss.groups(), logged(printed), values
    assert any(found), printed[-2000:]
    return found


@pytest.fixture(scope="module")
def undamaged(corpora, trained, tmp_path_factory):
    """Return the results of each reader for the undamaged checkpoint."""
    found = {}
    for name, words in READERS.items():
        model = tmp_path_factory.mktemp("undamaged") / "model"
        path = shutil.copytree(trained("transformer_xl"), model) / "checkpoint_last.pt"
        found[name] = results(run(*words(path, corpora)), path)
    return found


# all readers share one loader, so that only the first one gets all changes
FEW = ("cut in the middle", "a bit flipped in its middle", "a tensor less", "a NaN")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reader", "change"),
    [
        (reader, change)
        for reader in READERS
        for change in ([*DAMAGES, *FEW[2:]] if reader == "fairseq-eval-lm" else FEW)
    ],
)
def test_a_changed_checkpoint(reader, change, model, corpora, undamaged):
    """It is refused by its name, or the reader gives the same results as before."""
    path = model / "checkpoint_last.pt"
    change_checkpoint(path, change)
    status, printed = Command(*READERS[reader](path, corpora)).wait()
    if status:
        assert_refused(status, printed, path.name)
        assert not path.with_name("average.pt").exists()
    else:
        assert results(printed, path) == undamaged[reader]


@pytest.mark.parametrize("paper", ["product_key_memory", "weighted_transformer"])
def test_the_checkpoint_of_another_model(paper, corpora, trained, model):
    path = model / "checkpoint_last.pt"
    shutil.copy(trained(paper) / path.name, path)
    words = training_command(corpora, "transformer_xl", model, "--max-update", 21)
    assert_refused(*Command(*words).wait(), path.name)


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
