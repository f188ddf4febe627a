import json
import multiprocessing
import os

import pytest

from scripts._shared.files import atomic_write, write_json, write_text


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_fails_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half():
        with atomic_write(path) as partial:
            partial.write_text("ne")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert names(tmp_path) == ["file"]
    assert path.read_text() == "old"
    with atomic_write(path) as partial:
        partial.write_text("new")
    assert names(tmp_path) == ["file"]
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_killed_runs_child_may_write_the_same_file(tmp_path, error):
    path = tmp_path / "file"

    def write_late():
        with atomic_write(path) as partial:
            partial.write_text("late")
            if error:
                raise error

    child = multiprocessing.get_context("fork").Process(target=write_late)
    with atomic_write(path) as partial:
        partial.write_text("new")
        child.start()
        child.join()
        assert path.exists() == (error is None)
        # of a process that has ended, and of one that has not
        for process in (child.pid, os.getppid()):
            path.with_name(f"file.partial-{process}").touch()
    assert path.read_text() == "new"
    path.with_name("file.partial-kept").touch()
    write_text(path, "newer")
    assert names(tmp_path) == ["file", f"file.partial-{os.getppid()}", "file.partial-kept"]
    assert path.read_text() == "newer"


def test_json_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"a": "\u00e9"})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OSError, match=r"folder\.json"):
        write_json(tmp_path / "folder.json", 1)
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "\u00e9"}
    assert names(tmp_path) == ["file.json", "folder.json"]
