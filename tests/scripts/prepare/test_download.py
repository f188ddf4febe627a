import re

import pytest

from scripts.prepare import _download as download
from scripts.prepare._checksums import Checksum
from tests.scripts.prepare.file_server import serve

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def server():
    with serve({"data.zip": CONTENT}) as server:
        yield server


def check(path, label):
    if path.read_bytes() != CONTENT:
        raise ValueError(f"{label} is wrong")


def fetch(folder, *mirrors):
    return download.download("data.zip", mirrors, folder, check)


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
    monkeypatch.setattr(download, "TIMEOUT", 0.1)
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
    read = download._read
    blocks = []

    def interrupted(response):
        if blocks:
            raise KeyboardInterrupt
        blocks.append(read(response))
        return blocks[0]

    monkeypatch.setattr(download, "_read", interrupted)
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
