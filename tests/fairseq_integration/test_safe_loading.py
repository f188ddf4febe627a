"""Safe loading accepts the containers in fairseq's checkpoints, and refuses what runs code."""

import argparse
import os
import zipfile
from collections import defaultdict

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import OmegaConf

import fairseq_plugins  # noqa: F401 (allows the containers)
from fairseq_plugins.fairseq_integration.safe_loading import read_checkpoint

STATE = {
    "args": None,
    "model": {"weight": torch.arange(4096.0)},
    "optimizer_history": [{"num_updates": 7, "criterion_name": "", "lr_scheduler_state": {}}],
    "extra_state": {"train_iterator": {"epoch": 1}, "val_loss": 1.0},
    "last_optimizer_state": {},
}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    torch.save(STATE, path)
    return path


@pytest.mark.parametrize(
    "thing",
    [
        argparse.Namespace(arch="transformer", optimizer=argparse.Namespace(lr=[0.1])),
        OmegaConf.create({"lr": [0.1, 0.2], "name": None, "model": {"dropout": "${lr}"}}),
        {"task": OmegaConf.create([1, {"a": 2}]), "model": argparse.Namespace(dropout=0.1)},
        defaultdict(dict),
        _TensorPlaceholder(3),
        # --eval-bleu leaves these in a meter
        np.int64(4),
        np.float64(0.5),
        np.arange(4),
        np.arange(4.0),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_containers_are_loaded_as_they_were(thing, tmp_path):
    torch.save({"cfg": thing}, tmp_path / "last.pt")
    found = torch.load(tmp_path / "last.pt")["cfg"]
    assert type(found) is type(thing)
    if isinstance(thing, np.ndarray):
        assert found.dtype == thing.dtype
        found, thing = found.tolist(), thing.tolist()
    assert found == thing


def test_a_cut_file_of_old_versions_of_torch_and_another_archive_are_named(tmp_path):
    path = tmp_path / "last.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    for cut in (0, 4, 30, 100, len(content) // 2, -1):
        path.write_bytes(content[:cut])
        problem = "it is empty" if cut == 0 else "torch cannot read it to its end"
        message = rf"^CHECKPOINT is cut short or damaged \({problem}\): name"
        with pytest.raises(ValueError, match=message):
            read_checkpoint(path, "CHECKPOINT")
    for name in ("x.txt", "a/x.txt"):
        with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
            archive.writestr(name, "text")
        with pytest.raises(ValueError, match=r"^CHECKPOINT is an archive"):
            read_checkpoint(tmp_path / "other.zip", "CHECKPOINT")


@pytest.mark.parametrize(
    ("words", "archive"),
    [("DefaultCPUAllocator: can't allocate memory", False), ("unable to mmap 9 bytes", True)],
)
def test_what_a_machine_lacks_is_no_damage(tmp_path, monkeypatch, words, archive):
    def fail(*args, **options):
        raise RuntimeError(words)

    torch.save({}, tmp_path / "last.pt", _use_new_zipfile_serialization=archive)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        read_checkpoint(tmp_path / "last.pt", "CHECKPOINT")


class Printing:
    def __reduce__(self):
        return print, ()


@pytest.mark.parametrize("archive", [True, False])
def test_no_error_advises_to_run_what_is_in_a_file(tmp_path, archive):
    path = tmp_path / "last.pt"
    torch.save({"model": Printing()}, path, _use_new_zipfile_serialization=archive)
    with pytest.raises(ValueError, match=r"^CHECKPOINT holds more than weights") as raised:
        read_checkpoint(path, "CHECKPOINT")
    message = str(raised.value)
    assert "GLOBAL print" in message
    assert "weights_only" not in message
    assert message.endswith("name one that fairseq-train wrote")
    assert ("cut short" in message) != archive


@pytest.mark.parametrize(("archive", "checksums"), [(True, True), (False, True), (True, False)])
def test_a_checkpoint_is_read_as_it_was_written(tmp_path, archive, checksums):
    """So are files of old versions of torch, and files without checksums."""
    path = tmp_path / "checkpoint_last.pt"
    torch.serialization.set_crc32_options(checksums)
    torch.save(STATE, path, _use_new_zipfile_serialization=archive)
    torch.serialization.set_crc32_options(True)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])


@pytest.mark.parametrize("damage", ["empty", "head", "half", "end", "bit", "text"])
def test_a_damaged_checkpoint_is_named_with_what_to_take(saved, damage):
    content = saved.read_bytes()
    flipped = bytearray(content)
    flipped[content.index(torch.arange(4096.0)[100:110].numpy().tobytes())] ^= 1
    damaged = {
        **{"empty": b"", "text": b"not a checkpoint", "bit": flipped, "head": content[:100]},
        **{"half": content[: len(content) // 2], "end": content[:-1]},
    }
    saved.write_bytes(damaged[damage])
    damaged = f"^the checkpoint {saved} is cut short or damaged .*: "
    with pytest.raises(ValueError, match=damaged + "no other is whole here$"):
        checkpoint_utils.load_checkpoint_to_cpu(str(saved))
    older, newer = (saved.with_name(name) for name in ("checkpoint1.pt", "checkpoint2.pt"))
    for number, other in enumerate((older, newer)):
        torch.save(STATE, other)
        os.utime(other, (number, number))
    saved.with_name("checkpoint3.pt").write_bytes(saved.read_bytes())
    # the newest entry is a broken link
    saved.with_name("checkpoint4.pt").symlink_to("none.pt")
    with pytest.raises(ValueError, match=f"{damaged}take {newer} \\(--restore-file"):
        checkpoint_utils.load_checkpoint_to_cpu(str(saved))


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "checkpoint_last.pt")
    for path in (tmp_path, tmp_path / "checkpoint_last.pt"):
        with pytest.raises(ValueError, match=f"^the checkpoint {path} is not a file: name one"):
            checkpoint_utils.load_checkpoint_to_cpu(str(path))


@pytest.mark.parametrize(
    ("content", "lacking"),
    [
        ([1, 2], "model"),
        ({**STATE, "model": torch.ones(2)}, "model"),
        ("args", "cfg"),
        ("optimizer_history", "optimizer_history"),
        ("extra_state", "extra_state"),
    ],
)
def test_what_fairseq_did_not_write_is_named(saved, content, lacking):
    if isinstance(content, str):
        content = {name: value for name, value in STATE.items() if name != content}
    torch.save(content, saved)
    message = f"^the checkpoint {saved} is not fairseq's \\(it has no {lacking}\\): name one"
    with pytest.raises(ValueError, match=message):
        checkpoint_utils.load_checkpoint_to_cpu(str(saved))


def test_what_the_first_versions_of_fairseq_wrote_is_read(saved):
    first = {"best_loss": 1.0, "optimizer": {}, "epoch": 3, "batch_offset": 0, "val_loss": 1.0}
    torch.save({"args": None, "model": STATE["model"], **first}, saved)
    state = checkpoint_utils.load_checkpoint_to_cpu(str(saved))
    assert state["extra_state"]["train_iterator"]["epoch"] == 3
