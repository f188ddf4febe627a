"""Checkpoints that would run something when they are loaded, given to all that opens checkpoints.

Each construction would make a folder, the mark. A case passes when there is none and the command
refuses the file in a sentence.
"""

import builtins
import functools
import io
import os
import pickle
import random
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scripts.check._faults_materials import Materials
from scripts.check._faults_programs import (
    Case,
    CaseFailedError,
    check_elsewhere,
    check_refusal,
    run,
    succeed,
)


class Reduced:
    """An object whose pickle calls a function with arguments."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call[0], self._call[1:]


def in_checkpoint(payload: Any) -> Callable[[Path, Path], None]:
    """Put what makes the mark into the state of a checkpoint that is whole otherwise."""

    def write(path: Path, mark: Path) -> None:
        state = torch.load(path, weights_only=True)
        state["extra_state"]["more"] = payload(str(mark))
        torch.save(state, path)

    return write


def as_weight(payload: Any) -> Callable[[Path, Path], None]:
    """Put what makes the mark in place of a weight."""

    def write(path: Path, mark: Path) -> None:
        state = torch.load(path, weights_only=True)
        state["model"][next(iter(state["model"]))] = payload(str(mark))
        torch.save(state, path)

    return write


def opcodes(make: Callable[[bytes], bytes], in_archive: bool) -> Callable[[Path, Path], None]:
    """Write opcodes of a pickle alone, in the archive that torch reads or as old versions did."""

    def write(path: Path, mark: Path) -> None:
        content = make(str(mark).encode())
        if not in_archive:
            path.write_bytes(content)
            return
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in (
                ("data.pkl", content),
                ("version", b"3\n"),
                ("byteorder", b"little"),
            ):
                archive.writestr(f"archive/{name}", data)

    return write


def stacked(mark: bytes) -> bytes:
    """Opcodes that find a function by names on the stack and call it."""
    short = b"\x8c\x02os\x8c\x05mkdir\x93"
    return b"\x80\x04" + short + b"\x8c" + bytes([len(mark)]) + mark + b"\x85R."


def nested(mark: str) -> Any:
    """A pickle within a pickle, which a function of the library would load."""
    return Reduced(pickle.loads, pickle.dumps(Reduced(os.mkdir, mark)))


def in_objects(mark: str) -> np.ndarray:
    """An array of objects."""
    return np.array([Reduced(os.mkdir, mark)], dtype=object)


def chain(mark: str) -> Any:
    """Attributes of attributes, which end at a function."""
    found = Reduced(getattr, Reduced(getattr, builtins.__import__, "__self__"), "exec")
    return Reduced(functools.partial, found, f"import os; os.mkdir({mark!r})")


def archive_in_archive(mark: str) -> Any:
    """An archive of torch's within another, which torch itself would load."""
    inner = io.BytesIO()
    torch.save(Reduced(os.mkdir, mark), inner)
    trusting = functools.partial(torch.load, weights_only=False)
    return Reduced(trusting, Reduced(io.BytesIO, inner.getvalue()))


# what would make the mark: how, and how it gets into a file
CONSTRUCTIONS: dict[str, Callable[[Path, Path], None]] = {
    "a function that is called": in_checkpoint(lambda mark: Reduced(os.mkdir, mark)),
    "a weight that is called": as_weight(lambda mark: Reduced(os.mkdir, mark)),
    "text that is evaluated": in_checkpoint(
        lambda mark: Reduced(eval, f"__import__('os').mkdir({mark!r})")
    ),
    "a chain of attributes": in_checkpoint(chain),
    "stacked opcodes": opcodes(stacked, False),
    "stacked opcodes in an archive": opcodes(stacked, True),
    "an instance of old classes": opcodes(lambda m: b"(S'" + m + b"'\nios\nmkdir\n.", True),
    "an object of old classes": opcodes(lambda m: b"(cos\nmkdir\nS'" + m + b"'\no.", True),
    "a module that does it when imported": opcodes(lambda m: b"\x80\x02cside_effects\nx\n.", True),
    "a pickle in a pickle": in_checkpoint(nested),
    "an array of objects": in_checkpoint(in_objects),
    "an archive in an archive": in_checkpoint(archive_in_archive),
}


def commands(materials: Materials) -> dict[str, tuple[str, Callable[[Path], tuple[Any, ...]]]]:
    """What opens checkpoints: the paper whose checkpoint it is given, and its words."""
    text = ("--data", materials.text)
    other = materials.checkpoints["transformer_xl"].with_name("checkpoint_1_4.pt")
    return {
        "fairseq-eval-lm": ("transformer_xl", materials.evaluation),
        "fairseq-generate": ("weighted_transformer", materials.translation),
        "fairseq-train --restore-file": (
            "transformer_xl",
            lambda path: materials.training(
                *("transformer_xl", path.parent, "--restore-file", path, "--max-update", 9)
            ),
        ),
        "fairseq-train --finetune-from-model": (
            "transformer_xl",
            lambda path: materials.training(
                *("transformer_xl", path.parent / "new", "--finetune-from-model", path),
                *("--max-update", 1),
            ),
        ),
        "convert.average": (
            "transformer_xl",
            lambda path: (
                *("scripts.convert.average", path, other, "--output", path.parent / "a.pt"),
            ),
        ),
        "convert.checkpoint": (
            "transformer_xl",
            lambda path: (
                *materials.conversion(materials.foreign, path.parent / "out"),
                *("--checkpoint", path),
            ),
        ),
        "evaluate.memory_usage": (
            "product_key_memory",
            lambda path: (
                *("scripts.evaluate.memory_usage", *text, "--checkpoint", path, "--cpu"),
                *("--output", path.parent / "out"),
            ),
        ),
        "evaluate.attention_length": (
            "transformer_xl",
            lambda path: (
                *("scripts.evaluate.attention_length", *text, "--checkpoint", path, "--cpu"),
                *("--mem-len", 4, "--output", path.parent / "out"),
            ),
        ),
        "plot.attention_spans": (
            "all_attention",
            lambda path: (
                *("scripts.plot.attention_spans", "--checkpoint", path),
                *("--output", path.parent / "out"),
            ),
        ),
        "plot.branch_weights": (
            "weighted_transformer",
            lambda path: (
                *("scripts.plot.branch_weights", "--checkpoint", path),
                *("--output", path.parent / "out"),
            ),
        ),
        "load": (
            "transformer_xl",
            lambda path: ("scripts.check._faults_load", path, materials.text),
        ),
    }


def open_hostile(
    materials: Materials,
    paper: str,
    words: Callable[[Path], tuple[Any, ...]],
    write: Callable[[Path, Path], None],
    folder: Path,
) -> None:
    """Give a command a hostile checkpoint; raises CaseFailedError."""
    path, mark = folder / "model" / "checkpoint.pt", folder / "mark"
    path.parent.mkdir()
    shutil.copy(materials.checkpoints[paper], path)
    write(path, mark)
    module = folder / "modules" / "side_effects.py"
    module.parent.mkdir()
    module.write_text(f"import os\nos.mkdir({str(mark)!r})\nx = 1\n")

    outcome = run(words(path), folder, inject=lambda: sys.path.insert(0, str(module.parent)))
    if mark.exists():
        raise CaseFailedError("what is in the file was executed")
    check_refusal(outcome, path.name)
    check_elsewhere(folder)


def open_harmless(
    materials: Materials, paper: str, words: Callable[[Path], tuple[Any, ...]], folder: Path
) -> None:
    """Give a command the checkpoint as it is; raises CaseFailedError unless it opens it."""
    path = folder / "model" / "checkpoint.pt"
    path.parent.mkdir()
    shutil.copy(materials.checkpoints[paper], path)
    succeed(words(path), folder)


def cases(materials: Materials, quick: bool, draw: random.Random) -> Iterator[Case]:
    """Every construction through every command, or one through each."""
    for command, (paper, words) in commands(materials).items():
        if command != "convert.checkpoint":
            # without which the refusals below say nothing; that one takes only other code's
            yield Case(
                f"{command}: nothing hostile",
                functools.partial(open_harmless, materials, paper, words),
            )
        names = draw.sample(list(CONSTRUCTIONS), 1) if quick else CONSTRUCTIONS
        for name in names:

            def test(
                folder: Path, paper: str = paper, words: Any = words, name: str = name
            ) -> None:
                open_hostile(materials, paper, words, CONSTRUCTIONS[name], folder)

            yield Case(f"{command}: {name}", test)
