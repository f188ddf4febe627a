"""Disks that are full and folders that may not be written: a sentence, and what was there stays."""

import ctypes
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.check._faults_materials import Materials, translation
from scripts.check._faults_programs import (
    Case,
    CaseFailedError,
    CaseSkippedError,
    check_refusal,
    digests,
    run,
    succeed,
)

NOBODY = 65534
# Bytes that a file may have: from none at all to most of a checkpoint.
SIZES = (0, 1000, 20_000)
# bytes of a disk that is full soon
DISK = 24_000
# of mount(2): change how something is mounted, and let nothing be written there
READ_ONLY = 32 | 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def limit_files(size: int) -> None:
    """Let no file grow beyond a size, as a quota does."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def be_nobody() -> None:
    """Become a user who may write nowhere but in the folder of temporary files."""
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def mount(folder: Path, size: int) -> None:
    """Mount a disk of some bytes on a folder; raises CaseSkippedError where that is not allowed."""
    options = f"size={size}".encode()
    if _LIBC.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options):
        raise CaseSkippedError(f"no disk can be mounted ({os.strerror(ctypes.get_errno())})")


def commands(materials: Materials) -> dict[str, Callable[[Path], tuple[Any, ...]]]:
    """What writes files: its words for an output."""
    model = materials.checkpoints["transformer_xl"]
    several = [model, model.with_name("checkpoint_1_4.pt")]
    return {
        "fairseq-train": lambda output: materials.training(
            "transformer_xl", output, "--max-update", 12, "--save-interval-updates", 2
        ),
        "convert.average": lambda output: (
            *("scripts.convert.average", *several, "--output", output / "average.pt"),
        ),
        "convert.checkpoint": lambda output: materials.conversion(materials.foreign, output / "x"),
        "prepare.number_names": lambda output: (
            *("scripts.prepare.number_names", "--output", output / "x", "--train", 2000),
            *("--valid", 20, "--test", 20),
        ),
        "prepare.translation": lambda output: translation(materials.texts, output / "x"),
        "plot.branch_weights": lambda output: (
            *("scripts.plot.branch_weights", "--output", output / "x"),
            *("--checkpoint", materials.checkpoints["weighted_transformer"].parent),
        ),
    }


def write_without_room(
    words: Callable[[Path], tuple[Any, ...]],
    materials: Materials,
    inject: Callable[[], None] | None,
    output: Path,
    must_fail: bool,
) -> None:
    """Run a command where it cannot write, with a checkpoint there; raises CaseFailedError.

    Args:
        words: of the command, for an output.
        materials: have the checkpoint.
        inject: is called in its process first.
        output: where it is to write, in the case's folder.
        must_fail: it would write more than there is room for.
    """
    kept = output / "checkpoint_last.pt"
    shutil.copy(materials.checkpoints["transformer_xl"], kept)
    before = digests(output)
    outcome = run(words(output), output.parent, inject=inject, piped=True)
    after = digests(output)
    if any(after.get(name) != digest for name, digest in before.items()):
        raise CaseFailedError("what was there has changed")
    left = [name for name in after if name.endswith(".tmp") or ".partial" in name]
    if left:
        raise CaseFailedError(f"a part of a file is left: {', '.join(left)}")
    if outcome.status != 0:
        check_refusal(outcome, str(output))
    elif must_fail:
        raise CaseFailedError("it ends as if it had written all")


def largest_file(materials: Materials, command: str) -> int:
    """Bytes of the largest file that a command writes undisturbed; raises CaseFailedError."""
    words, folder = commands(materials)[command], materials.folder / "undisturbed" / command
    output = folder / "output"
    if not output.exists():
        output.mkdir(parents=True)
        succeed(words(output), folder)
    return max(path.stat().st_size for path in output.rglob("*") if path.is_file())


def cases(materials: Materials, quick: bool, draw: random.Random) -> Iterator[Case]:
    """Each command with files of some sizes, on a small disk, and without permission."""

    def limited(command: str, words: Any, size: int) -> Callable[[Path], None]:
        def test(folder: Path) -> None:
            output = folder / "output"
            output.mkdir()
            too_much = largest_file(materials, command) > size
            write_without_room(words, materials, lambda: limit_files(size), output, too_much)

        return test

    def mounted(command: str, words: Any, read_only: bool) -> Callable[[Path], None]:
        def test(folder: Path) -> None:
            output = folder / "output"
            output.mkdir()
            mount(output, materials.checkpoints["transformer_xl"].stat().st_size + DISK)
            place = str(output).encode()

            def protect() -> None:
                # by the command itself, once the checkpoint is there
                if _LIBC.mount(None, place, None, READ_ONLY, None):
                    raise OSError(ctypes.get_errno(), "the disk cannot be made read-only")

            try:
                too_much = read_only or largest_file(materials, command) > DISK
                inject = protect if read_only else None
                write_without_room(words, materials, inject, output, too_much)
            finally:
                _LIBC.umount(place)

        return test

    def forbidden(words: Any) -> Callable[[Path], None]:
        def test(folder: Path) -> None:
            output = folder / "output"
            output.mkdir()
            if os.getuid() == 0:
                # permissions are nothing to the superuser
                for name in ("here", "tmp"):
                    (folder / name).mkdir()
                    (folder / name).chmod(0o777)
            output.chmod(0o555)
            inject = be_nobody if os.getuid() == 0 else None
            try:
                write_without_room(words, materials, inject, output, True)
            finally:
                output.chmod(0o755)

        return test

    found = []
    for command, words in commands(materials).items():
        for size in SIZES:
            test = limited(command, words, size)
            found.append(Case(f"{command}: files of {size} bytes", test))
        disk = f"{command}: a disk with {DISK} bytes"
        found.append(Case(disk, mounted(command, words, False)))
        found.append(Case(f"{command}: a read-only disk", mounted(command, words, True)))
        found.append(Case(f"{command}: no permission", forbidden(words)))
    yield from draw.sample(found, 6) if quick else found
