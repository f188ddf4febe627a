"""Tensors that the importer reads, what it refuses, and that it executes nothing."""

import re
import sys
from pathlib import Path

import pytest
import torch

from scripts.convert._foreign import ForeignTensors, read_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(4)}
# in zip archives, and as torch.save wrote before them
FORMATS = [True, False]


class Executed:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def save(content, path, archive=True):
    torch.save(content, path, _use_new_zipfile_serialization=archive)
    return path


def refused(path):
    """The message that a checkpoint is refused with, without the option that names it."""
    label = f"--checkpoint {path} "
    with pytest.raises(ValueError, match=f"^{re.escape(label)}") as error:
        read_tensors(path)
    return str(error.value).removeprefix(label)


def assert_tensors(found):
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("archive", FORMATS)
@pytest.mark.parametrize(
    "content",
    [
        TENSORS,
        {"model": TENSORS, "iter_no": 3, "optimizer": {"lr": 0.1}},
        {"state_dict": TENSORS, "epoch": 3},
        {f"module.{name}": tensor for name, tensor in TENSORS.items()},
        {"model": {f"module.{name}": tensor for name, tensor in TENSORS.items()}},
    ],
    ids=["plain", "model", "state_dict", "parallel", "both"],
)
def test_tensors_are_found(tmp_path, archive, content):
    assert_tensors(read_tensors(save(content, tmp_path / "model.pt", archive)))


def test_parameters_are_tensors(tmp_path):
    content = {name: torch.nn.Parameter(tensor) for name, tensor in TENSORS.items()}
    assert_tensors(read_tensors(save(content, tmp_path / "model.pt")))


def test_a_prefix_of_some_names_is_a_part_of_them(tmp_path):
    content = {"module.a": torch.ones(1), "b": torch.ones(1)}
    assert read_tensors(save(content, tmp_path / "model.pt")).keys() == content.keys()


def test_safetensors_are_read(tmp_path):
    from safetensors.torch import save_file

    save_file(TENSORS, tmp_path / "model.safetensors")
    assert_tensors(read_tensors(tmp_path / "model.safetensors"))


def test_what_is_no_file_is_refused(tmp_path):
    message = "is no file: name the weights that the original code saved"
    assert refused(tmp_path / "none.pt") == message
    assert refused(tmp_path) == message


@pytest.mark.parametrize("archive", FORMATS)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds dict, not tensors by name"),
        ([TENSORS], "holds list, not tensors by name"),
        (torch.ones(2), "holds Tensor, not tensors by name"),
        ({"model": {}}, "holds dict, not tensors by name"),
        (
            {**TENSORS, "epoch": 3, "lr": 0.1},
            "has more than tensors among the weights: 'epoch', 'lr'; save these alone, as a state "
            "dict",
        ),
        ({"model": {**TENSORS, 5: None}}, "holds dict, not tensors by name"),
        ({0: torch.ones(2)}, "holds dict, not tensors by name"),
    ],
)
def test_files_without_tensors_by_name_are_refused(tmp_path, archive, content, message):
    remedy = ": save the state dict of the model" if message.endswith("by name") else ""
    assert refused(save(content, tmp_path / "model.pt", archive)) == message + remedy


@pytest.mark.parametrize("archive", FORMATS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_whole_model_is_refused_with_what_extracts_its_tensors(tmp_path, archive, wrapped):
    model = torch.nn.Linear(2, 2)
    path = save({"model": model} if wrapped else model, tmp_path / "whole.pt", archive)
    assert refused(path) == (
        "holds more than tensors, and loading the rest would execute what is in it. If it is a "
        "whole model, extract its tensors where it was trained, with the original code:\n"
        '    model = torch.load("whole.pt", map_location="cpu")\n'
        '    torch.save(model.state_dict(), "weights.pt")\n'
        "and name weights.pt here"
    )


@pytest.mark.parametrize("archive", FORMATS)
def test_the_lines_that_extract_the_tensors_do(tmp_path, monkeypatch, archive):
    model = torch.nn.Linear(3, 2)
    message = refused(save(model, tmp_path / "whole.pt", archive))
    monkeypatch.chdir(tmp_path)
    # the PyTorch of the original code's time loaded all
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *words, **how: load(*words, **how, weights_only=False)
    )
    names = {"torch": torch}
    for line in message.splitlines():
        if line.startswith("    "):
            exec(line.strip(), names)
    monkeypatch.undo()
    found = read_tensors(tmp_path / "weights.pt")
    assert torch.equal(found["weight"], model.weight)


@pytest.mark.parametrize("archive", FORMATS)
def test_nothing_in_a_file_is_executed(tmp_path, archive):
    executed = tmp_path / "executed"
    path = save({**TENSORS, "z": Executed(executed)}, tmp_path / "model.pt", archive)
    assert refused(path).startswith("holds more than tensors")
    assert not executed.exists()
    # so a loader that executes would be found out
    torch.load(path, weights_only=False)
    assert executed.exists()


@pytest.mark.parametrize("archive", FORMATS)
def test_a_file_that_is_cut_short_is_refused(tmp_path, archive):
    whole = save(TENSORS, tmp_path / "model.pt", archive).read_bytes()
    cut = tmp_path / "cut.pt"
    for length in range(0, len(whole), 11):
        cut.write_bytes(whole[:length])
        # a name that is cut short is another one, which is not executed either
        assert refused(cut).startswith(("is broken or no file of", "holds more than tensors"))


def test_a_flipped_bit_is_refused(tmp_path):
    path = save(TENSORS, tmp_path / "model.pt", True)
    content = bytearray(path.read_bytes())
    content[content.index(next(iter(TENSORS.values())).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    assert refused(path) == "is broken: a checksum in it is wrong; get it anew"


@pytest.mark.parametrize(
    "content",
    [b"hello world", b"<!DOCTYPE html><html>", b"version https://git-lfs.github.com/spec/v1\n"],
    ids=["text", "page", "pointer"],
)
def test_a_file_of_something_else_is_refused(tmp_path, content):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    assert refused(path).startswith("is broken or no file of torch.save")


@pytest.mark.parametrize("length", [0, 7, 40, -1])
def test_broken_safetensors_are_refused(tmp_path, length):
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:length])
    assert re.match(r"is broken: .*header", refused(path))


def test_safetensors_without_their_package_are_refused(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = "needs the package safetensors: pip install safetensors"
    assert refused(tmp_path / "model.safetensors") == message


def test_problems_of_tensors_are_named():
    problems = []
    tensors = ForeignTensors(
        {
            "fits": torch.ones(2, 3, dtype=torch.float16),
            "wide": torch.ones(2, 4),
            "number": torch.tensor(1.0),
            "infinite": torch.tensor([1.0, torch.inf]),
            "first": torch.ones(2),
            "second": torch.ones(2),
            "third": torch.zeros(2),
            "whole": torch.ones(2, dtype=torch.long),
            "complex": torch.ones(2, dtype=torch.complex64),
            "sparse": torch.ones(2).to_sparse(),
            "meta": torch.ones(2, device="meta"),
            "skipped": torch.ones(1),
            "left": torch.ones(1),
            "also left": torch.ones(1),
        },
        problems,
    )
    fits = tensors.take("fits", 2, 3)
    assert fits.dtype == torch.float32
    assert not problems
    for name, shape in [
        ("wide", (2, 3)),
        ("number", (1,)),
        ("infinite", (2,)),
        ("none", (5, 6, 7)),
    ]:
        assert torch.equal(tensors.take(name, *shape), torch.zeros(shape))
    assert torch.equal(tensors.take_tied("absent", ["fits", "missing"], 2, 3), fits)
    assert torch.equal(tensors.take_tied("first", ["second", "third"], 2), torch.ones(2))
    tensors.take_tied("missing", ["also missing"], 3)
    for kind in ("whole", "complex", "sparse", "meta"):
        tensors.take(kind, 2)
    tensors.skip("skipped")
    tensors.note_surplus()
    assert problems == [
        "wide is 2 x 4, and by the configuration 2 x 3",
        "number is a number, and by the configuration 1",
        "infinite has a number that is not finite",
        "the checkpoint lacks none (5 x 6 x 7)",
        "third differs from first: the configuration says tied, the weights are not",
        "the checkpoint lacks missing (3)",
        *(
            f"{kind} is not of floating-point numbers, all of them there"
            for kind in ("whole", "complex", "sparse", "meta")
        ),
        "nothing takes 'also left' of the checkpoint",
        "nothing takes 'left' of the checkpoint",
    ]
