"""Files that other people made, damaged or wrong: refused in a sentence, or read as they are meant.

Each case is a row of a table: what is done to a file, and which command reads it.
"""

import os
import random
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.check._faults_foreign import foreign_cases
from scripts.check._faults_materials import Materials, logged, translation
from scripts.check._faults_programs import (
    Case,
    CaseFailedError,
    Known,
    Outcome,
    check_elsewhere,
    check_refusal,
    digests,
    read_tensors,
    run,
    succeed,
)
from scripts.prepare._sources import Checksum

UNCLOSED = Known(
    "a traceback: .*_bin_buffer_mmap",
    "After the sentence fairseq tells what it could not close. Binarize the text again.",
)
OWN_WORDS = Known(
    "a traceback: .*Model file not found",
    "fairseq tells in its own words that there is no such file. Give the file's path.",
)

Change = Callable[[bytes, random.Random], bytes]
NO_CHECKSUM = Known(
    "^Evaluated .* where it was Evaluated ",
    "fairseq's format has no checksum: where the result is a symbol of the dictionary, nothing can "
    "tell. Keep one beside the data (sha256sum).",
)


def flip(content: bytes, draw: random.Random) -> bytes:
    """Change a random bit."""
    changed = bytearray(content)
    changed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(changed)


DAMAGES: dict[str, Change] = {
    "empty": lambda content, draw: b"",
    "its first byte alone": lambda content, draw: content[:1],
    "cut in the middle": lambda content, draw: content[: len(content) // 2],
    "without its last byte": lambda content, draw: content[:-1],
    "with a byte more": lambda content, draw: content + b"\x01",
    "zeros": lambda content, draw: bytes(len(content)),
    "text": lambda content, draw: b"not what it should be\n",
}
FLIPS = 4
# Dictionaries of other models in place of dict.txt.
DICTIONARIES: dict[str, Change] = {
    "a symbol less": lambda content, draw: content[: content[:-1].rindex(b"\n") + 1],
    "twenty symbols more": lambda content, draw: (
        content + b"".join(b"more%d 1\n" % n for n in range(20))
    ),
    "of another text": lambda content, draw: b"".join(b"other%d 9\n" % n for n in range(40)),
}
LAST = "checkpoint_last.pt"
# a checkpoint beside the changed one, to average with
OTHER = "checkpoint_other.pt"
MEAN = "average.pt"

# Changes to the weights of a checkpoint.
WEIGHTS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "lacks a tensor": lambda model, name: model.pop(name),
    "has a tensor more": lambda model, name: model.update({"decoder.extra": model[name]}),
    "has a tensor of another shape": lambda model, name: model.update({name: model[name][:-1]}),
    "has a NaN": lambda model, name: model[name].view(-1)[:1].fill_(float("nan")),
    "has an infinity": lambda model, name: model[name].view(-1)[:1].fill_(float("inf")),
    "has a number for a tensor": lambda model, name: model.update({name: 1.0}),
    "has no weights": lambda model, name: model.clear(),
}

# Texts for a preparation: what they hold, and what its error names; "" where it is as good as any,
# EITHER where it may be refused or not.
EITHER = "either"
TEXTS: dict[str, tuple[bytes, str]] = {
    "Windows line ends": (b"the cat sat\r\non a mat\r\n" * 30, ""),
    "a byte-order mark": (b"\xef\xbb\xbf" + b"the cat sat\non a mat\n" * 30, ""),
    "a line of a million symbols": (b"the cat sat\n" * 30 + b"a " * 10**6 + b"\n", ""),
    "no newline at its end": (b"the cat sat\non a mat\n" * 30 + b"dog", ""),
    "invalid UTF-8": (b"the cat\n\xff\xfe sat\n", "line 2"),
    "half a character at its end": ("the cat é".encode()[:-1], "line 1"),
    "UTF-16": (("the cat sat\n" * 30).encode("utf-16"), "line 1"),
    "nothing": (b"", "train"),
    "empty lines": (b"\n" * 30, "train"),
    "a token": (b"a\n", "train"),
    "NUL bytes": (b"the cat\0 sat\non a mat\n" * 30, ""),
}


def damaged_data(materials: Materials, name: str, change: Change, seed: str, folder: Path) -> None:
    """Evaluate on data of which a file is changed; raises CaseFailedError."""
    data = folder / "data"
    shutil.copytree(materials.text, data)
    path = data / name
    path.write_bytes(change(path.read_bytes(), random.Random(seed)))
    words = materials.evaluation(materials.checkpoints["transformer_xl"])
    outcome = run((words[0], data, *words[2:]), folder)
    if outcome.status == 0:
        expected = run(words, folder / "expected")
        if figures(outcome) != figures(expected):
            raise CaseFailedError(f"{figures(outcome)} where it was {figures(expected)}")
    else:
        check_refusal(outcome, name.split(".")[0])
    check_elsewhere(folder)


def figures(outcome: Outcome) -> str:
    """Loss of an evaluation, and the number of tokens."""
    tokens = re.search(r"Evaluated [\d,]+ tokens", outcome.printed)
    loss = re.search(r"Loss \(base 2\): \S+", outcome.printed)
    return f"{tokens and tokens[0]}, {loss and loss[0].rstrip(',')}"


def changed_checkpoint(
    materials: Materials,
    words: Callable[[Path], tuple[Any, ...]],
    change: Callable[[Path], None],
    folder: Path,
    *parts: str,
) -> None:
    """Give a command a checkpoint that is changed; raises CaseFailedError.

    It may do without what was changed: then it must end as with the checkpoint as it was.
    """
    path = folder / "model" / LAST
    path.parent.mkdir()
    last = materials.checkpoints["transformer_xl"]
    shutil.copy(last, path)
    shutil.copy(last.with_name("checkpoint_1_4.pt"), path.with_name(OTHER))
    whole = folder / "whole" / LAST
    shutil.copytree(path.parent, whole.parent)
    change(path)
    outcome = run(words(path), folder)
    if outcome.status == 0:
        expected = succeed(words(whole), folder / "expected")
        if results(outcome, path) != results(expected, whole):
            raise CaseFailedError("it is accepted, with another result")
        return
    check_refusal(outcome, *parts)
    check_elsewhere(folder)


def results(outcome: Outcome, path: Path) -> tuple[Any, ...]:
    """What a command printed and wrote beside a checkpoint; raises CaseFailedError for nothing."""
    mean = path.with_name(MEAN)
    written = read_tensors(mean) if mean.exists() else {}
    tensors = {name: (x.shape, x.flatten().tolist()) for name, x in written.items()}
    evaluated, trained = figures(outcome), logged(outcome.printed)
    if not (tensors or trained or "Loss" in evaluated):
        raise CaseFailedError("it ends without a result")
    return evaluated, trained, tensors


def change_bytes(change: Change, seed: str, path: Path) -> None:
    """Change the bytes of a file."""
    path.write_bytes(change(path.read_bytes(), random.Random(seed)))


def change_weights(change: Callable[[dict[str, Any], str], None], path: Path) -> None:
    """Change the weights of a checkpoint."""
    state = torch.load(path, weights_only=True)
    change(state["model"], "decoder.layers.1.self_attn.out_proj.weight")
    torch.save(state, path)


def text_to_prepare(materials: Materials, text: bytes, named: str, folder: Path) -> None:
    """Prepare a text as both sides of a translation; raises CaseFailedError."""
    source = folder / "raw"
    shutil.copytree(materials.texts, source)
    for side in ("en", "de"):
        (source / f"train.{side}").write_bytes(text)
    outcome = run(translation(source, folder / "made" / "output"), folder)
    if not named:
        if outcome.status != 0:
            raise CaseFailedError(f"it is refused: {outcome.last}")
        lines = (folder / "made" / "output" / "tokens" / "train.en").read_bytes()
        expected = text.removeprefix(b"\xef\xbb\xbf").rstrip(b"\n").count(b"\n") + 1
        count = lines.count(b"\n")
        if count != expected or b"\r" in lines or b"\xef\xbb\xbf" in lines:
            raise CaseFailedError(f"{expected} lines became {count}, or hold what ends lines")
    elif named != EITHER or outcome.status != 0:
        check_refusal(outcome, *([] if named == EITHER else [named]))
        if (folder / "made").exists() and any(
            ".partial" in name for name in digests(folder / "made")
        ):
            raise CaseFailedError("a part of a file is left")
    check_elsewhere(folder)


def place_to_prepare(materials: Materials, make: Callable[[Path], None], folder: Path) -> None:
    """Prepare a text that is no file; raises CaseFailedError unless it is refused."""
    source = folder / "raw"
    shutil.copytree(materials.texts, source)
    path = source / "train.en"
    path.unlink()
    make(path)
    check_refusal(run(translation(source, folder / "output"), folder, limit=60), "train")
    check_elsewhere(folder)


def put_place(make: Callable[[Path], None], path: Path) -> None:
    """Put something else in place of a file."""
    path.unlink()
    make(path)


def put_other(materials: Materials, paper: str, path: Path) -> None:
    """Put the checkpoint of another paper in place of a file."""
    shutil.copy(materials.checkpoints[paper], path)


def data_place(materials: Materials, name: str, make: Callable[[Path], None], folder: Path) -> None:
    """Evaluate on data of which a file is no file; raises CaseFailedError unless it is refused."""
    data = folder / "data"
    shutil.copytree(materials.text, data)
    put_place(make, data / name)
    words = materials.evaluation(materials.checkpoints["transformer_xl"])
    check_refusal(run((words[0], data, *words[2:]), folder, limit=60), name.split(".")[0])
    check_elsewhere(folder)


PLACES: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
}


def write_zip(path: Path, names: list[str], content: bytes = b"a b\n") -> None:
    """Write an archive with these names in it."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, content)


def write_links(path: Path) -> None:
    """Write an archive whose members are links out of it."""
    with tarfile.open(path, "w:gz") as archive:
        for split in ("train", "valid", "test"):
            entry = tarfile.TarInfo(f"ptb.{split}.txt")
            entry.type, entry.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(entry)


PTB = ["ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"]
ARCHIVES: dict[str, Callable[[Path], None]] = {
    "names outside": lambda path: write_zip(path, [f"../../../{name}" for name in PTB]),
    "absolute names": lambda path: write_zip(path, [f"/tmp/faults/{name}" for name in PTB]),
    "other content": lambda path: write_zip(path, PTB),
    "a gigabyte of zeros": lambda path: write_zip(path, PTB, bytes(2**30)),
    "links": write_links,
    "no file of its kind": lambda path: write_zip(path, ["other.txt"]),
    "cut short": lambda path: (write_zip(path, PTB), path.write_bytes(path.read_bytes()[:-30]))[0],
    "empty": lambda path: path.write_bytes(b"") and None,
}


def accept() -> None:
    """Let archives have any checksum, so that what is in them is looked at."""
    Checksum.check = lambda *given: None


def archive_to_prepare(write: Callable[[Path], None], unpacked: bool, folder: Path) -> None:
    """Prepare a published data set from an archive; raises CaseFailedError unless it refuses.

    Its checksums end that, unless it is to be unpacked.
    """
    archive = folder / "archive"
    write(archive)
    words = ("scripts.prepare.ptb", "--output", folder / "made" / "output", "--from", archive)
    outcome = run(words, folder, inject=accept if unpacked else None)
    check_refusal(outcome, "archive|vocabulary")
    if (folder / "made").exists() and any((folder / "made").iterdir()):
        raise CaseFailedError("something of it is left")
    check_elsewhere(folder)


def all_cases(materials: Materials, draw: random.Random) -> Iterator[Case]:
    """Every case there is."""
    changes = {**DAMAGES, **{f"a flipped bit, {n}": flip for n in range(FLIPS)}}
    for name in ("test.bin", "test.idx", "dict.txt"):
        for damage, change in {**changes, **DICTIONARIES}.items():
            if damage in DICTIONARIES and name != "dict.txt":
                continue
            test = partial(damaged_data, materials, name, change, str(draw.random()))
            unseen = name == "test.bin" and damage.startswith(("zeros", "a flipped"))
            known = NO_CHECKSUM if unseen else None
            yield Case(f"{name}: {damage}", test, known)
    readers = {
        "fairseq-eval-lm": materials.evaluation,
        "fairseq-train": lambda path: materials.training(
            "transformer_xl", path.parent, "--max-update", 9
        ),
        "average": lambda path: (
            *("scripts.convert.average", path, path.with_name(OTHER)),
            *("--output", path.with_name(MEAN)),
        ),
    }
    for reader, words in readers.items():
        # without which the refusals below say nothing; no error has these words
        taken = "(it must be taken)"
        yield changed(materials, reader, words, lambda path: None, "the checkpoint itself", taken)
        for damage, change in changes.items():
            alter = partial(change_bytes, change, str(draw.random()))
            yield changed(materials, reader, words, alter, f"the checkpoint {damage}")
        for damage, change_tensor in WEIGHTS.items():
            alter = partial(change_weights, change_tensor)
            yield changed(materials, reader, words, alter, f"the checkpoint {damage}")
    for name in ("test.bin", "test.idx", "dict.txt"):
        for place, make in PLACES.items():
            test = partial(data_place, materials, name, make)
            known = UNCLOSED if (name, place) == ("test.bin", "a folder") else None
            yield Case(f"{name}: in place of it {place}", test, known)
    for place, make in PLACES.items():
        if place != "missing":
            alter = partial(put_place, make)
            name = f"in place of the checkpoint {place}"
            found = changed(materials, "fairseq-eval-lm", materials.evaluation, alter, name)
            yield found._replace(known=OWN_WORDS) if place == "a link to itself" else found
    for paper in ("all_attention", "product_key_memory", "weighted_transformer"):
        for reader in ("fairseq-eval-lm", "fairseq-train"):
            if (paper, reader) == ("all_attention", "fairseq-eval-lm"):
                # which evaluates any model of segments
                continue
            alter = partial(put_other, materials, paper)
            name, told = (
                f"the checkpoint of {paper}",
                LAST if reader == "fairseq-train" else "--arch",
            )
            yield changed(materials, reader, readers[reader], alter, name, told)
    for name, (text, named) in TEXTS.items():
        test = partial(text_to_prepare, materials, text, named)
        yield Case(f"prepare.translation: a text with {name}", test)
    for name, make in PLACES.items():
        test = partial(place_to_prepare, materials, make)
        yield Case(f"prepare.translation: in place of a text {name}", test)
    for name, write in ARCHIVES.items():
        # a checksum is all that ends an archive of any size
        for unpacked in (False, True) if name != "a gigabyte of zeros" else (False,):
            title = f"prepare.ptb: an archive with {name}{', checksums aside' if unpacked else ''}"
            yield Case(title, partial(archive_to_prepare, write, unpacked))
    yield from foreign_cases(materials, changes, WEIGHTS, draw)


def changed(
    materials: Materials,
    reader: str,
    words: Callable[[Path], tuple[Any, ...]],
    alter: Callable[[Path], None],
    name: str,
    told: str = LAST,
) -> Case:
    """Case of a command that is given a changed checkpoint, and must tell of it."""

    def test(folder: Path) -> None:
        changed_checkpoint(materials, words, alter, folder, told)

    return Case(f"{reader}: {name}", test)


def cases(materials: Materials, quick: bool, draw: random.Random) -> Iterator[Case]:
    """All cases, or some of them drawn at random."""
    found = list(all_cases(materials, draw))
    yield from draw.sample(found, 24) if quick else found
