"""Archives from mirrors, of which some break or send something else."""

import pytest

from tests.scripts.prepare.prepared import lines, refused, serve, write_files, zipped
from tests.scripts.prepare.published import FILES, expect_small


@pytest.mark.parametrize("name", ["enwik8", "ptb"])
def test_a_mirror_is_used_after_others_that_broke_or_sent_something_else(
    call, monkeypatch, tmp_path, name
):
    main, out, files = expect_small(monkeypatch, name), tmp_path / "out", FILES[name]
    words = ("--output", out, *(("--newlines", "eos") if name == "enwik8" else ("--workers", 1)))
    page, other = (dict.fromkeys(files, sent) for sent in (b"<html>", zipped({name: b"other"})))
    for sent, cut, named in ((files, 3, "--from"), (page, None, name), (other, None, name)):
        with serve(sent, cut) as (url, _):
            assert refused(call(main, *words, "--mirror", url), named)
        assert not out.exists()
    with serve({}) as (empty, first), serve(files) as (url, second):
        assert call(main, *words, "--mirror", empty, "--mirror", f"{url}/")[0] == 0
    assert first == second == list(files)
    assert lines(out / "bin", "test")
    assert not (out / "download").exists()


def test_archives_that_arrived_before_a_failure_are_not_downloaded_again(
    call, monkeypatch, tmp_path
):
    main, out, files = expect_small(monkeypatch, "ptb"), tmp_path / "out", FILES["ptb"]
    words, (first, *others) = ("--output", out, "--workers", 1, "--mirror"), files
    with serve({first: files[first]}) as (url, _):
        assert refused(call(main, *words, url), f"{others[0]} cannot be downloaded")
    assert [path.name for path in out.rglob("*") if path.is_file()] == [first]
    with serve(files) as (url, asked):
        assert call(main, *words, url)[0] == 0
    assert asked == others
    assert not (out / "download").exists()


@pytest.mark.parametrize("path", ["x.zip", ""])
def test_another_archive_than_the_published_one_is_refused(call, monkeypatch, tmp_path, path):
    write_files(tmp_path / "archives", {"x.zip": zipped({"text": b""})})
    main, source = expect_small(monkeypatch, "wikitext103"), tmp_path / "archives" / path
    assert refused(call(main, "--output", tmp_path / "out", "--from", source), f"--from {source}")
    assert not (tmp_path / "out").exists()
