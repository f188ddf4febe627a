"""Scripts read checkpoints without running what is in them, and name other files."""

import os
import zipfile

import pytest
import torch

from scripts._shared.checkpoints import checkpoint_options, read_checkpoint

STATE = {"cfg": {"model": {"_name": "a"}, "task": None}, "model": {"weight": torch.arange(4096.0)}}


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "before PyTorch 1.6"])
def test_read_checkpoint_returns_what_was_written_and_names_a_file_cut_short(tmp_path, archive):
    path = tmp_path / "last.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=archive)
    state = read_checkpoint(path)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert checkpoint_options(state, "model") == {"_name": "a"}
    assert checkpoint_options(state, "task") == checkpoint_options(state, "other") == {}
    content = path.read_bytes()
    for cut in (0, 4, 30, 100, len(content) // 2):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=r"^--checkpoint .*last\.pt .*(cut short|damaged)"):
            read_checkpoint(path)


def test_read_checkpoint_names_what_is_no_checkpoint(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("x.txt", "text")
    (tmp_path / "text").write_bytes(b"not a checkpoint")
    for name in ("pipe", "other.zip", "text", "none"):
        with pytest.raises(ValueError, match=f"^--checkpoint .*{name}.*: name one that f"):
            read_checkpoint(tmp_path / name)
