import dataclasses
import errno
import re
import shutil
from types import SimpleNamespace

import pytest

from scripts.prepare import _characters
from tests.scripts.prepare.file_server import serve
from tests.scripts.prepare.small_datasets import (
    LETTERS,
    SMALL,
    caller,
    given,
    nothing_left,
    options_of,
    refused,
    small_scripts,
    zipped,
)


@pytest.fixture
def scripts(monkeypatch):
    return small_scripts(monkeypatch)


@pytest.fixture
def call(scripts, monkeypatch, tmp_path, capsys):
    return caller(scripts, monkeypatch, tmp_path / "out", capsys)


@pytest.mark.parametrize("name", SMALL)
def test_file_with_another_checksum_is_refused(call, tmp_path, name):
    source = given(tmp_path, name)
    checked = next(iter(SMALL[name][2]))
    if name in ("enwik8", "text8"):
        source.write_bytes(zipped({name: SMALL[name][2][name] + b"a"}))
        what = f"{source}, {name},"
    elif name == "ptb":
        (source / checked).write_bytes(b"other\n")
        what = f"{source}, {checked},"
    else:
        source.write_bytes(source.read_bytes()[:-1])
        what = f"{source}"
    kind = "sha256" if name == "lm1b" else "md5"
    message = rf"--from {re.escape(what)} has {kind} [0-9a-f]+, the published one is [0-9a-f]+: it"
    assert refused(call(name, "--from", source, *options_of(name)), message)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("name", SMALL)
def test_download_with_another_checksum_is_deleted(call, tmp_path, name):
    with serve({file: content[:-1] for file, content in SMALL[name][1].items()}) as server:
        result = call(name, "--mirror", server.url, *options_of(name))
    assert refused(result, r"\S+ cannot be downloaded: http://\S+( \S+,)? (has|is a truncated)")
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("name", SMALL)
def test_broken_download_is_kept_and_resumed(call, tmp_path, name):
    files = SMALL[name][1]
    first = next(iter(files))
    with serve(files, cut=5) as server:
        # after the first 5 bytes the server has gone
        server.ranges = False
        result = call(name, "--mirror", server.url, *options_of(name))
    kept = tmp_path / "out.partial" / f"{first}.partial"
    message = rf"{re.escape(first)} cannot be downloaded \(the part in {kept} is kept and resumed\)"
    assert refused(result, message)
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == [f"{first}.partial"]
    with serve(files) as server:
        status, _, _ = call(name, "--mirror", server.url, *options_of(name))
    assert status == 0
    assert server.requests[0] == (f"/{first}", "bytes=5-")
    assert not (tmp_path / "out.partial").exists()


def test_complete_download_outlives_a_later_failure(call, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "train.bin")

    with serve(SMALL["text8"][1]) as server, monkeypatch.context() as patch:
        patch.setattr(_characters, "write_split", fail)
        result = call("text8", "--mirror", server.url)
    message = (
        rf"--output {tmp_path}/out: \[Errno 28\] No space left on device: 'train.bin': make room, "
        "or give a folder where you may read and write"
    )
    assert refused(result, message)
    assert [path.name for path in (tmp_path / "out.partial").iterdir()] == ["text8.zip"]
    assert not (tmp_path / "out").exists()
    # without any mirror
    assert call("text8", "--mirror", "http://nowhere.invalid")[0] == 0


def test_failure_with_a_given_file_leaves_nothing(call, scripts, tmp_path, monkeypatch):
    source = given(tmp_path, "text8")
    other = dataclasses.replace(scripts["text8"].TEXT8, vocabulary=27)
    monkeypatch.setattr(scripts["text8"], "TEXT8", other)
    result = call("text8", "--from", source)
    assert refused(
        result, "text8: the text has a vocabulary of 3 symbols, the published one has 27"
    )
    assert nothing_left(tmp_path)


def test_rest_of_a_killed_run_is_removed(call, tmp_path):
    (tmp_path / "out.partial" / "corpus" / "bin").mkdir(parents=True)
    (tmp_path / "out.partial" / "corpus" / "bin" / "stray").touch()
    assert call("text8", "--from", given(tmp_path, "text8"))[0] == 0
    assert not (tmp_path / "out" / "bin" / "stray").exists()


@pytest.mark.parametrize("downloaded", [True, False])
def test_interrupted_run(call, tmp_path, monkeypatch, downloaded):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_characters, "write_split", interrupt)
    with serve(SMALL["text8"][1]) as server:
        place = ("--mirror", server.url) if downloaded else ("--from", given(tmp_path, "text8"))
        status, _, error = call("text8", *place)
    assert status == 130
    kept = f"what was downloaded is kept in {tmp_path}/out.partial"
    kept = kept if downloaded else "nothing is left"
    assert error == f"\ninterrupted; {kept}, run the same command again\n"
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists() == downloaded


def test_too_little_space_is_refused(call, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=999))
    message = (
        rf"--output {tmp_path}/out: text8 takes up to 0.00 GB while it is prepared, 0.00 GB are "
        "free: make room or give a folder on another disk"
    )
    assert refused(call("text8", "--from", given(tmp_path, "text8")), message)
    assert nothing_left(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert call("text8", "--from", given(tmp_path, "text8"))[0] == 0


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("text8", "--from {}/no", "--from {}/no does not exist: give the path of text8.zip"),
        (
            "wikitext103",
            "--from {}",
            "--from {} is a folder, whose content cannot be checked: give wikitext-103-v1.zip",
        ),
        ("text8", "--from {}/x.zip", "--from {}/x.zip lacks text8: give it as it was published"),
        (
            "text8",
            "--from {}/cut.zip",
            r"--from {}/cut.zip is a truncated or damaged archive \(.*\): get it anew",
        ),
        (
            "ptb",
            "--srcdict {}/no",
            r"--srcdict {}/no cannot be read \(No such file or directory\): give the dict\.txt of",
        ),
        ("enwik8", "", "--newlines is missing: give 'drop' to .* or 'eos' to .* do not compare"),
        ("ptb", "--workers 0", "--workers is 0: it must be at least 1"),
        (
            "text8",
            "--from {0}/x.zip --output {0}/x.zip/out",
            r"--output {}/x.zip/out: \[Errno 20\] Not a directory: .*: make room, or give a folder",
        ),
    ],
)
def test_impossible_request_is_refused_and_leaves_nothing(call, tmp_path, name, options, message):
    (tmp_path / "x.zip").write_bytes(zipped({"text9": b""}))
    (tmp_path / "cut.zip").write_bytes(zipped({"text8": LETTERS})[:-30])
    assert refused(call(name, *options.format(tmp_path).split()), message.format(tmp_path))
    assert nothing_left(tmp_path)


def test_corpus_with_other_options_is_refused(call, tmp_path):
    source = given(tmp_path, "enwik8")
    assert call("enwik8", "--from", source, "--newlines", "eos")[0] == 0
    prepared = f"--output {tmp_path}/out was prepared with another"
    result = call("enwik8", "--from", source, "--newlines", "drop")
    assert refused(result, rf"{prepared} --newlines \(eos, now drop\): remove it or give another")
    (tmp_path / "dict.txt").write_text("97 1\n98 1\n32 1\n")
    result = call("enwik8", "--newlines", "eos", "--srcdict", tmp_path / "dict.txt")
    assert refused(result, rf"{prepared} --srcdict \(None, now [0-9a-f]+\): remove it")
    result = call("text8", "--from", source)
    assert refused(result, f"--output {tmp_path}/out exists and does not hold text8: remove it or")


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_folder_with_something_else_is_refused(call, tmp_path, content):
    (tmp_path / "out").mkdir()
    if content is not None:
        (tmp_path / "out" / "corpus.json").write_text(content)
    message = f"--output {tmp_path}/out exists and does not hold text8: remove it or give another"
    assert refused(call("text8", "--from", given(tmp_path, "text8")), message)


def test_mirror_and_file_exclude_each_other(call):
    with pytest.raises(SystemExit):
        call("text8", "--mirror", "http://host", "--from", "file")
