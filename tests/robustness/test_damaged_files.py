"""Damaged and wrong files are refused by name, or read as what they were."""

import os
import shutil

import pytest

from tests.end_to_end.commands import call, evaluation_command, loss, run
from tests.end_to_end.trainings import assert_refused, training_command

DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a byte less": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\x01"),
    "text": lambda path: path.write_bytes(b"not what it should be\n"),
    "missing": os.remove,
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
}
# fairseq itself names a folder that should be a file of tokens
CASES = [(file, damage) for file in ("test.bin", "test.idx", "dict.txt") for damage in DAMAGES]
CASES.remove(("test.bin", "a folder"))


@pytest.mark.slow
@pytest.mark.parametrize(("file", "damage"), CASES)
def test_damaged_data_is_refused_by_name(file, damage, corpora, trained, tmp_path):
    data = shutil.copytree(corpora["text"], tmp_path / "data")
    DAMAGES[damage](data / file)
    checkpoint = trained("transformer_xl") / "checkpoint_last.pt"
    status, printed = call(*evaluation_command(data, checkpoint))
    if status:
        assert_refused(status, printed, file.split(".")[0])
    else:
        assert loss(printed) == loss(run(*evaluation_command(corpora["text"], checkpoint)))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["empty", "cut", "a byte less", "text"])
def test_a_damaged_checkpoint_is_refused(damage, trained, corpora, tmp_path):
    """fairseq's commands end with torch's error, convert.average names the file."""
    folder = shutil.copytree(trained("transformer_xl"), tmp_path / "model")
    path, mean = folder / "checkpoint_last.pt", folder / "average.pt"
    DAMAGES[damage](path)
    assert "Loss" not in run(*evaluation_command(corpora["text"], path), fails=True)
    words = ("scripts.convert.average", path, folder / "checkpoint_1_4.pt", "--output", mean)
    assert_refused(*call(*words), path.name)
    assert not mean.exists()


@pytest.mark.parametrize("paper", ["product_key_memory", "weighted_transformer"])
def test_training_refuses_another_models_checkpoint(paper, corpora, trained, tmp_path):
    shutil.copy(trained(paper) / "checkpoint_last.pt", tmp_path)
    words = training_command(corpora, "transformer_xl", tmp_path, "--max-update", 21)
    assert_refused(*call(*words), "Missing key|size mismatch|dictionary")
