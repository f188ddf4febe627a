import io
import re
import tarfile
import zipfile

import numpy as np
import pytest

from scripts.prepare._archives import read_members

CONTENTS = {"one": b"first\n" * 1000, "two": b"second\n"}
OTHER = "other"


def noise():
    # does not compress, so that an archive can be cut within it
    return np.random.default_rng(1).bytes(100_000)


def write_zip(path, contents, folder="a/b"):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in contents:
            archive.writestr(f"{folder}/{name}", content)


def write_tar(path, contents, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
        folder = tarfile.TarInfo("a/one")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in contents:
            entry = tarfile.TarInfo(f"a/b/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def write_folder(path, contents):
    path.mkdir()
    for name, content in contents:
        (path / name).write_bytes(content)


def read(path, names=("one", "two")):
    found = {}

    def take(name, stream):
        found[name] = stream.read()

    read_members(path, names, take, f"--from {path}")
    return found


@pytest.mark.parametrize(
    "write",
    [
        write_zip,
        write_tar,
        lambda path, contents: write_tar(path, contents, "w"),
        lambda path, contents: write_tar(path, contents, "w:xz"),
        write_folder,
    ],
)
def test_named_members_are_read(tmp_path, write):
    write(tmp_path / "data", [("two", CONTENTS["two"]), (OTHER, b"x"), ("one", CONTENTS["one"])])
    assert read(tmp_path / "data") == CONTENTS


def test_file_that_is_no_archive_stands_for_the_only_member(tmp_path):
    (tmp_path / "anything").write_bytes(b"text")
    assert read(tmp_path / "anything", ("one",)) == {"one": b"text"}


def test_file_that_is_no_archive_is_not_several_members(tmp_path):
    (tmp_path / "anything").write_bytes(b"text")
    with pytest.raises(ValueError, match="lacks one, two: give"):
        read(tmp_path / "anything")


@pytest.mark.parametrize("write", [write_zip, write_tar, write_folder])
def test_missing_member_is_refused(tmp_path, write):
    write(tmp_path / "data", [("two", b"")])
    message = f"--from {tmp_path}/data lacks one: give it as it was published"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read(tmp_path / "data")


def test_many_missing_members_are_told_in_short(tmp_path):
    write_zip(tmp_path / "data", [])
    with pytest.raises(ValueError, match="lacks a, b, c and more: give"):
        read(tmp_path / "data", ("a", "b", "c", "d"))


def test_member_that_is_there_twice_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "data", "w") as archive:
        for folder in ("a", "b"):
            archive.writestr(f"{folder}/one", b"")
    message = f"--from {tmp_path}/data has two files one: give one that has it once"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read(tmp_path / "data")


@pytest.mark.parametrize("write", [write_zip, write_tar])
@pytest.mark.parametrize("part", [0.5, 0.99])
def test_truncated_archive_is_refused(tmp_path, write, part):
    path = tmp_path / "data"
    write(path, [("one", noise()), ("two", noise())])
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    message = rf"^--from {re.escape(str(path))} is a truncated or damaged archive \(.+\): get it"
    with pytest.raises(ValueError, match=message):
        read(path)


def test_damaged_archive_is_refused(tmp_path):
    path = tmp_path / "data"
    write_zip(path, [("one", noise()), ("two", b"")])
    content = bytearray(path.read_bytes())
    content[50_000] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is a truncated or damaged archive"):
        read(path)
