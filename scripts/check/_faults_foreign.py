"""Models of other code that do not fit, for the converter: refused before anything is written."""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.check._faults_materials import Materials
from scripts.check._faults_programs import (
    Case,
    CaseFailedError,
    check_elsewhere,
    check_refusal,
    digests,
    run,
)

Change = Callable[[bytes, random.Random], bytes]
ChangeWeights = Callable[[dict[str, Any], str], None]
# Changes to the options of a model of other code.
CONFIGURATIONS: dict[str, tuple[str, Any]] = {
    f"{name} {value!r}": (name, value)
    for name, values in {
        "nb_layers": (-1, 0, 3, 10**9, "two", None, 1.5, float("nan"), True),
        "hidden_size": (-1, 0, 7, 10**9, "wide", [16]),
        "nb_heads": (0, 3, 10**9),
        "attn_span": (0, 11, 10**9),
        "pers_mem_size": (-1, 5, 10**9),
        "dropout": (-0.1, 1, float("nan"), "no"),
        "vocab_size": (0, 10**9),
        "block_size": (0, "long"),
        "adapt_span_enabled": (1, "yes"),
    }.items()
    for value in values
}
MISFITS = ("nb_layers 3", "pers_mem_size 5", "vocab_size 1000000000")
VOCABULARIES: dict[str, bytes] = {
    "empty": b"",
    "a symbol twice": b"<eos>\n<unk>\na\na\n",
    "a symbol fewer": b"<eos>\n<unk>\na\n",
    "Windows line ends": b"<eos>\r\n<unk>\r\na\r\nb\r\n",
    "invalid UTF-8": b"<eos>\n<unk>\n\xff\nb\n",
    "empty lines": b"<eos>\n\n\nb\n",
    "fairseq's own symbols": b"<eos>\n<unk>\n<pad>\nb\n",
}


def foreign(
    materials: Materials, change: Callable[[Path], None], folder: Path, *parts: str
) -> None:
    """Convert a model of other code that is changed; raises CaseFailedError.

    It may do without what was changed: then the result must be that of the model as it was.
    """
    source = folder / "foreign"
    shutil.copytree(materials.foreign, source)
    change(source)
    output = folder / "made" / "output"
    outcome = run(materials.conversion(source, output), folder, memory=4 << 30)
    if outcome.status == 0:
        run(materials.conversion(materials.foreign, folder / "expected"), folder / "whole")
        if digests(output) != digests(folder / "expected"):
            raise CaseFailedError("it is accepted, with another result")
        return
    check_refusal(outcome, *parts)
    if output.exists() and any(output.iterdir()):
        raise CaseFailedError("something was written")
    check_elsewhere(folder)


def change_configuration(name: str, value: Any, source: Path) -> None:
    """Set an option of a foreign model."""
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


def change_tensors(change: Callable[[dict[str, Any], str], None], source: Path) -> None:
    """Change the weights of a foreign model."""
    tensors = torch.load(source / "model.pt", weights_only=True)
    change(tensors, "layers.1.attn.proj_out.weight")
    torch.save(tensors, source / "model.pt")


def change_bytes(change: Change, seed: str, source: Path) -> None:
    """Change the bytes of the weights of a foreign model."""
    path = source / "model.pt"
    path.write_bytes(change(path.read_bytes(), random.Random(seed)))


def write_vocabulary(content: bytes, source: Path) -> None:
    """Give a foreign model another vocabulary."""
    (source / "vocab.txt").write_bytes(content)


def foreign_cases(
    materials: Materials,
    damages: Mapping[str, Change],
    weights: Mapping[str, ChangeWeights],
    draw: random.Random,
) -> Iterator[Case]:
    """Changed options, vocabularies, tensors and bytes.

    Args:
        materials: the model as it should be.
        damages: of bytes, by name.
        weights: changes to weights, by name.
        draw: where bytes are damaged.
    """
    for name, (option, value) in CONFIGURATIONS.items():
        # values that some model could have: the tensors that do not fit them are named
        named = () if name in MISFITS else (option,)
        yield case(materials, name, partial(change_configuration, option, value), *named)
    for name, content in VOCABULARIES.items():
        yield case(materials, f"a vocabulary with {name}", partial(write_vocabulary, content))
    for name, change_tensor in weights.items():
        yield case(materials, f"it {name}", partial(change_tensors, change_tensor))
    for name, change in damages.items():
        alter = partial(change_bytes, change, str(draw.random()))
        yield case(materials, f"weights {name}", alter)


def case(materials: Materials, name: str, alter: Callable[[Path], None], *named: str) -> Case:
    """Case of a foreign model that is altered."""
    test = partial(foreign, materials, alter)
    return Case(f"convert.checkpoint: {name}", lambda folder: test(folder, *named))
