"""Set-up is quick when repeated, and names a Python that does not fit."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, PINS = Path("scripts/set_up.sh"), Path("requirements/development.txt")


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout with a .venv that is set up."""
    root = (tmp_path / "check out").resolve()
    for path in (SCRIPT, PINS):
        (root / path).parent.mkdir(parents=True)
        shutil.copy(ROOT / path, root / path)
    texts = [(root / path).read_text().rstrip("\n") for path in (PINS, SCRIPT)]
    identity = "\n".join([str(root), sysconfig.get_config_var("SOABI"), *texts])
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").symlink_to(sys.executable)
    (root / ".venv/set_up.stamp").write_text(identity)
    return root


def set_up(checkout, python):
    words = ["bash", SCRIPT, python]
    ended = subprocess.run(words, cwd=checkout, capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout, ended.stderr


def test_a_repeated_set_up_does_nothing(checkout):
    assert set_up(checkout, sys.executable) == (0, "", "")


def test_a_python_that_does_not_fit_is_named_and_nothing_is_touched(checkout):
    status, output, errors = set_up(checkout, "no-python")
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert "no-python" in errors
    assert (checkout / ".venv/set_up.stamp").exists()
