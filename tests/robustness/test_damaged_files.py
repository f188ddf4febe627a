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
}


@pytest.mark.slow
@pytest.mark.parametrize("file", ["test.bin", "test.idx", "dict.txt"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_data_is_refused_by_name(file, damage, corpora, trained, tmp_path):
    if (file, damage) == ("test.bin", "a folder"):
        pytest.skip("fairseq itself refuses it, and names the folder")
    data = shutil.copytree(corpora["text"], tmp_path / "data")
    DAMAGES[damage](data / file)
    checkpoint = trained("transformer_xl") / "checkpoint_last.pt"
    status, printed = call(*evaluation_command(data, checkpoint))
    if status:
        assert_refused(status, printed, file.split(".")[0])
    else:
        assert loss(printed) == loss(run(*evaluation_command(corpora["text"], checkpoint)))


@pytest.mark.parametrize("paper", ["product_key_memory", "weighted_transformer"])
def test_training_refuses_another_models_checkpoint(paper, corpora, trained, tmp_path):
    shutil.copy(trained(paper) / "checkpoint_last.pt", tmp_path)
    words = training_command(corpora, "transformer_xl", tmp_path, "--max-update", 21)
    assert_refused(*call(*words), "Missing key|size mismatch|dictionary")
