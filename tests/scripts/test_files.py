"""Files are written whole or not at all."""

import pytest

from scripts._shared.files import atomic_write


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_atomic_write_keeps_the_old_file_after_an_error(tmp_path):
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
    # left by a killed run
    (tmp_path / "file.partial").write_text("a longer text")
    with atomic_write(path) as partial:
        partial.write_text("new")
    assert (names(tmp_path), path.read_text()) == (["file"], "new")
