"""Checkpoints load safely: the containers that fairseq's hold do, and what runs code does not."""

import argparse
import builtins
import functools
import importlib
import io
import os
import pickle
import subprocess
import zipfile
from collections import defaultdict

import numpy as np
import pytest
import torch
from fairseq.distributed.utils import _TensorPlaceholder
from omegaconf import OmegaConf

import fairseq_plugins  # noqa: F401 (allows the containers)
from fairseq_plugins.fairseq_integration.safe_loading import OPTION_CONTAINERS, read_checkpoint

NESTED = {"lr": [0.1, 0.2], "name": None, "model": {"layers": 3, "dropout": "${lr}", "on": True}}


def load(thing, **how):
    """Write a checkpoint and load it."""
    file = io.BytesIO()
    torch.save({"model": {"weight": torch.ones(2)}, "cfg": thing}, file)
    file.seek(0)
    return torch.load(file, **how)["cfg"]


@pytest.mark.parametrize(
    "thing",
    [
        argparse.Namespace(arch="transformer", optimizer=argparse.Namespace(lr=[0.1])),
        OmegaConf.create(NESTED),
        OmegaConf.create([1, {"a": 2}]),
        {"task": OmegaConf.create(NESTED), "model": argparse.Namespace(dropout=0.1)},
        defaultdict(dict),
        _TensorPlaceholder(3),
        np.int64(4),
        np.float64(0.5),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_containers_are_loaded_as_they_were(thing):
    assert load(thing, weights_only=True) == thing


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
def test_arrays_are_loaded_as_they_were(dtype):
    # as --eval-bleu leaves them in a meter
    array = np.arange(4, dtype=dtype)
    found = load({"sum": array, "avg": array[1]}, weights_only=True)
    assert (found["sum"] == array).all()
    assert (found["sum"].dtype, found["avg"]) == (dtype, 1)


def test_a_flipped_bit_is_told_before_anything_is_read(tmp_path):
    path = tmp_path / "last.pt"
    torch.save({"model": {"weight": torch.ones(1000)}}, path)
    content = bytearray(path.read_bytes())
    # among the numbers, where torch takes any bits
    content[content.index(torch.ones(9).numpy().tobytes()) + 2000] ^= 4
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^CHECKPOINT is cut .* \(a checksum in it is wrong\)"):
        read_checkpoint(path, "CHECKPOINT")


@pytest.mark.parametrize("cut", [0, 4, 30, 100, 0.5, -1])
@pytest.mark.parametrize("archive", [True, False])
def test_a_cut_file_is_told_in_plain_words(tmp_path, cut, archive):
    path = tmp_path / "last.pt"
    state = {"model": {"weight": torch.ones(1000)}}
    torch.save(state, path, _use_new_zipfile_serialization=archive)
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content)) if cut == 0.5 else cut])
    problem = "its end is missing" if archive else "torch cannot read it to its end"
    expected = "it is empty" if cut == 0 else problem
    with pytest.raises(ValueError, match=r"^CHECKPOINT is cut short or damaged \(.*: name") as told:
        read_checkpoint(path, "CHECKPOINT")
    assert f"({expected})" in str(told.value)


def test_an_archive_of_something_else_is_named(tmp_path):
    for name in ("x.txt", "a/x.txt"):
        with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
            archive.writestr(name, "text")
        with pytest.raises(ValueError, match=r"^CHECKPOINT is an archive without a checkpoint in"):
            read_checkpoint(tmp_path / "other.zip", "CHECKPOINT")


@pytest.mark.parametrize(
    ("told", "archive"),
    [("DefaultCPUAllocator: can't allocate memory", False), ("unable to mmap 9 bytes", True)],
)
def test_what_a_machine_lacks_is_no_damage(tmp_path, monkeypatch, told, archive):
    def fail(*args, **how):
        raise RuntimeError(told)

    torch.save({}, tmp_path / "last.pt", _use_new_zipfile_serialization=archive)
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(RuntimeError, match=f"^{told}$"):
        read_checkpoint(tmp_path / "last.pt", "CHECKPOINT")


class Calling:
    """What calls something when it is unpickled."""

    def __init__(self, function, *arguments):
        self.called = function, arguments

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (os.mkdir, ["made"]),
        (os.system, ["mkdir made"]),
        (subprocess.Popen, [["mkdir", "made"]]),
        (subprocess.check_output, [["mkdir", "made"]]),
        (builtins.eval, ["__import__('os').mkdir('made')"]),
        (builtins.exec, ["import os; os.mkdir('made')"]),
        (builtins.open, ["made", "w"]),
        (builtins.getattr, ["made", "upper"]),
        (builtins.__import__, ["os"]),
        (importlib.import_module, ["os"]),
        (functools.partial, [os.mkdir, "made"]),
        (pickle.loads, [pickle.dumps(1)]),
        (torch.load, ["made"]),
        (np.load, ["made"]),
        (np.save, ["made", 1]),
        (argparse.FileType("w"), ["made"]),
    ],
)
def test_what_runs_code_is_not_loaded(tmp_path, monkeypatch, function, arguments):
    monkeypatch.chdir(tmp_path)
    # safely is also how a checkpoint is loaded where nothing is said
    for how in ({"weights_only": True}, {}):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            load(Calling(function, *arguments), **how)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("archive", [True, False])
def test_no_error_advises_to_run_what_is_in_a_file(tmp_path, archive):
    path = tmp_path / "last.pt"
    torch.save({"model": Calling(print)}, path, _use_new_zipfile_serialization=archive)
    cut = "" if archive else " or is cut short,"
    message = f"^CHECKPOINT holds more than weights and options,{cut} and is not loaded "
    with pytest.raises(ValueError, match=message) as told:
        read_checkpoint(path, "CHECKPOINT")
    reason = "Unsupported global: GLOBAL print was not an allowed global by default"
    assert str(told.value).endswith(f" ({reason}): name one that fairseq-train wrote")


def test_nothing_else_is_allowed():
    """Whoever adds to the list says here that it holds values and runs nothing."""
    names = {f"{thing.__module__}.{thing.__qualname__}" for thing in OPTION_CONTAINERS[:-2]}
    assert names == {
        "argparse.Namespace",
        "builtins.dict",
        "builtins.int",
        "builtins.list",
        "collections.defaultdict",
        "fairseq.distributed.utils._TensorPlaceholder",
        "numpy.dtype",
        "numpy.dtypes.Float64DType",
        "numpy.dtypes.Int64DType",
        "numpy.ndarray",
        "omegaconf.base.ContainerMetadata",
        "omegaconf.base.Metadata",
        "omegaconf.dictconfig.DictConfig",
        "omegaconf.listconfig.ListConfig",
        "omegaconf.nodes.AnyNode",
        "typing.Any",
    }
    # numpy has moved them from version to version
    assert [thing.__name__ for thing in OPTION_CONTAINERS[-2:]] == ["_reconstruct", "scalar"]
