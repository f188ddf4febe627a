import http.client
import io
import re
import tarfile
import zipfile

import numpy as np
import pytest

from scripts.prepare import _sources
from scripts.prepare._sources import Checksum, download, read_members
from tests.scripts.prepare.file_server import serve

CONTENT = bytes(range(256)) * 1000
CONTENTS = {"one": b"first\n" * 1000, "two": b"second\n"}
OTHER = "other"


@pytest.fixture
def server():
    with serve({"data.zip": CONTENT}) as server:
        yield server


def check(path, label):
    if path.read_bytes() != CONTENT:
        raise ValueError(f"{label} is wrong")


def fetch(folder, *mirrors):
    return download("data.zip", mirrors, folder, check)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def kept(folder, size):
    (folder / "data.zip.partial").write_bytes(CONTENT[:size])


@pytest.mark.parametrize("place", ["/folder", "/folder/", "/folder/data.zip"])
def test_file_is_fetched_with_the_name_of_a_browser(tmp_path, server, place):
    path = fetch(tmp_path, server.url + place)
    assert path == tmp_path / "data.zip"
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["data.zip"]
    assert server.requests == [("/folder/data.zip", None)]


def test_partial_download_is_resumed(tmp_path, server):
    kept(tmp_path, 1000)
    assert fetch(tmp_path, server.url).read_bytes() == CONTENT
    assert names(tmp_path) == ["data.zip"]
    assert server.requests == [("/data.zip", "bytes=1000-")]


def test_partial_download_that_is_complete_is_only_checked(tmp_path, server):
    kept(tmp_path, len(CONTENT))
    assert fetch(tmp_path, server.url).read_bytes() == CONTENT
    assert len(server.requests) == 1


def test_partial_download_longer_than_the_file_is_begun_anew(tmp_path, server):
    (tmp_path / "data.zip.partial").write_bytes(CONTENT + b"more")
    assert fetch(tmp_path, server.url).read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [f"bytes={len(CONTENT) + 4}-", None]


def test_mirror_without_ranges_sends_the_file_anew(tmp_path, server):
    server.ranges = False
    kept(tmp_path, 1000)
    assert fetch(tmp_path, server.url).read_bytes() == CONTENT


def test_mirror_that_sends_another_range_is_given_up(tmp_path, server):
    server.shift = 1
    kept(tmp_path, 1000)
    reason = f"sent bytes 1001-{len(CONTENT) - 1}/{len(CONTENT)}, not those asked for"
    with pytest.raises(ValueError, match=re.escape(f"{server.url}/data.zip: {reason}: look")):
        fetch(tmp_path, server.url)
    assert (tmp_path / "data.zip.partial").read_bytes() == CONTENT[:1000]


def test_broken_connections_are_resumed_while_bytes_arrive(tmp_path, server, capsys):
    server.cut = 100_000
    assert fetch(tmp_path, server.url).read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == [None, "bytes=100000-", "bytes=200000-"]
    message = f"the connection ended after 100,000 of {len(CONTENT):,} bytes; resuming"
    assert message in capsys.readouterr().out


def test_truncated_file_is_no_download_and_is_kept(tmp_path, server):
    server.cut, server.ranges = 100_000, False
    message = (
        f"data.zip cannot be downloaded (the part in {tmp_path}/data.zip.partial is kept and "
        f"resumed): {server.url}/data.zip: the connection ended after 100,000 of 256,000 bytes: "
        "look after the connection, name another place with --mirror URL, or get the file "
        "yourself and give it with --from"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fetch(tmp_path, server.url)
    assert names(tmp_path) == ["data.zip.partial"]
    assert (tmp_path / "data.zip.partial").read_bytes() == CONTENT[:100_000]


def test_mirrors_are_tried_in_turn(tmp_path, server):
    with serve({}) as empty:
        assert fetch(tmp_path, empty.url, server.url).read_bytes() == CONTENT
        assert len(empty.requests) == 1
    assert fetch(tmp_path, server.url) == tmp_path / "data.zip"


def test_reasons_of_all_mirrors_are_told(tmp_path):
    with serve({}) as one, serve({"data.zip": b"other"}) as two:
        message = (
            f"data.zip cannot be downloaded: {one.url}/data.zip: HTTP status 404 (Not Found); "
            f"{two.url}/data.zip is wrong: look"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            fetch(tmp_path, one.url, two.url)
    assert names(tmp_path) == []


def test_unreachable_mirror_is_given_up(tmp_path):
    with serve({}) as server:
        pass
    with pytest.raises(ValueError, match=r"data\.zip: .*[Cc]onnection refused.*: look after"):
        fetch(tmp_path, server.url)


def test_url_that_is_none_is_given_up(tmp_path):
    with pytest.raises(ValueError, match=r"http://a b/data\.zip: .*: look after"):
        fetch(tmp_path, "http://a b")


def test_stalled_mirror_is_given_up(tmp_path, server, monkeypatch):
    monkeypatch.setattr(_sources, "TIMEOUT", 0.1)
    server.cut, server.stalls = 0, True
    with pytest.raises(ValueError, match=r"data\.zip: .*timed out: look after"):
        fetch(tmp_path, server.url)


def test_wrong_content_is_deleted_and_the_next_mirror_begins_anew(tmp_path, server):
    with serve({"data.zip": b"x" * len(CONTENT)}) as wrong:
        assert fetch(tmp_path, wrong.url, server.url).read_bytes() == CONTENT
    assert server.requests == [("/data.zip", None)]


def test_part_of_something_else_is_deleted(tmp_path, server):
    (tmp_path / "data.zip.partial").write_bytes(b"x" * 1000)
    with pytest.raises(ValueError, match=r"data\.zip is wrong"):
        fetch(tmp_path, server.url)
    assert names(tmp_path) == []


def test_file_that_is_there_is_checked_and_taken(tmp_path):
    (tmp_path / "data.zip").write_bytes(CONTENT)
    assert fetch(tmp_path, "http://nowhere.invalid") == tmp_path / "data.zip"


def test_damaged_file_that_is_there_is_fetched_anew(tmp_path, server):
    (tmp_path / "data.zip").write_bytes(CONTENT[:-1])
    assert fetch(tmp_path, server.url).read_bytes() == CONTENT


def test_interrupted_download_is_kept(tmp_path, server, monkeypatch):
    read = http.client.HTTPResponse.read1
    blocks = []

    def interrupted(response, size):
        if blocks:
            raise KeyboardInterrupt
        blocks.append(read(response, size))
        return blocks[0]

    monkeypatch.setattr(http.client.HTTPResponse, "read1", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, server.url)
    assert names(tmp_path) == ["data.zip.partial"]
    assert (tmp_path / "data.zip.partial").read_bytes() == blocks[0] == CONTENT[: len(blocks[0])]


def test_mirror_that_is_no_web_address_is_refused(tmp_path):
    message = (
        "--mirror ftp://host is no http:// or https:// URL: "
        "give the URL of the folder that has data.zip"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fetch(tmp_path, "ftp://host")


def test_checksum(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    good = Checksum("md5", "900150983cd24fb0d6963f7d28e17f72")
    with path.open("rb") as stream:
        good.check(stream, "file")
    message = (
        "file has md5 900150983cd24fb0d6963f7d28e17f72, the published one is 00: "
        "it is truncated, damaged or another edition, get it anew"
    )
    with path.open("rb") as stream, pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Checksum("md5", "00").check(stream, "file")


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


def test_encrypted_archive_is_refused(tmp_path):
    path = tmp_path / "data"
    write_zip(path, [("one", noise())])
    content = path.read_bytes()
    # the flag that says so, before the file and in the directory at the end
    for signature, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        flags = content.index(signature) + place
        content = content[:flags] + bytes([content[flags] | 1]) + content[flags + 1 :]
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged archive \(.*is encrypted"):
        read(path)
