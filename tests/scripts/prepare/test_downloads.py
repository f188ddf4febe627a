"""Archives from hosts that break off or send something else."""

import pytest

from tests.scripts.prepare.prepared import lines, refused, serve, write_files, zipped
from tests.scripts.prepare.published import FILES, expect_small


@pytest.mark.parametrize("name", ["enwik8", "ptb"])
def test_an_archive_that_broke_off_or_is_another_is_downloaded_again(
    call, monkeypatch, tmp_path, name
):
    out, files = tmp_path / "out", FILES[name]
    words = ("--output", out, *(("--newlines", "eos") if name == "enwik8" else ("--workers", 1)))
    page, other = (dict.fromkeys(files, sent) for sent in (b"<html>", zipped({name: b"other"})))
    for sent, cut, named in ((files, 3, "--from"), (page, None, name), (other, None, name)):
        with serve(sent, cut) as (host, _):
            assert refused(call(expect_small(monkeypatch, name, host), *words), named)
        assert not out.exists()
    with serve(files) as (host, asked):
        assert call(expect_small(monkeypatch, name, host), *words)[0] == 0
    assert asked == list(files)
    assert lines(out / "bin", "test")
    assert not (out / "download").exists()


def test_archives_that_arrived_before_a_failure_are_not_downloaded_again(
    call, monkeypatch, tmp_path
):
    out, files = tmp_path / "out", FILES["ptb"]
    words, (first, *others) = ("--output", out, "--workers", 1), files
    with serve({first: files[first]}) as (host, _):
        result = call(expect_small(monkeypatch, "ptb", host), *words)
    assert refused(result, f"{others[0]} cannot be downloaded")
    assert [path.name for path in out.rglob("*") if path.is_file()] == [first]
    with serve(files) as (host, asked):
        assert call(expect_small(monkeypatch, "ptb", host), *words)[0] == 0
    assert asked == others
    assert not (out / "download").exists()


@pytest.mark.parametrize("path", ["x.zip", ""])
def test_another_archive_than_the_published_one_is_refused(call, monkeypatch, tmp_path, path):
    write_files(tmp_path / "archives", {"x.zip": zipped({"text": b""})})
    main, source = expect_small(monkeypatch, "wikitext103"), tmp_path / "archives" / path
    assert refused(call(main, "--output", tmp_path / "out", "--from", source), f"--from {source}")
    assert not (tmp_path / "out").exists()
