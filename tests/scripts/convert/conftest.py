"""A check for import_error imports."""

import pytest

from tests.scripts.convert.foreign_models import run_importer


@pytest.fixture
def import_error(tmp_path, capsys):
    """Check that the importer refuses a model's files, and return its error message."""

    def check(foreign, write=True, name="model.pt"):
        if write:
            foreign.write(tmp_path)
        assert run_importer(foreign, tmp_path, tmp_path / "output", name) == 1
        assert not list(tmp_path.glob("output*"))
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    return check
