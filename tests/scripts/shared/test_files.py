import json

import pytest

from scripts._shared.files import atomic_write, write_json


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
    assert (names(tmp_path), path.read_text()) == (["file"], "old")
    # of a run that was killed
    (tmp_path / "file.partial").write_text("a longer text")
    with atomic_write(path) as partial:
        partial.write_text("new")
    assert (names(tmp_path), path.read_text()) == (["file"], "new")


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
