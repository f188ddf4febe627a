import hashlib
import re
import zipfile
from types import SimpleNamespace

import pytest

from scripts.prepare import _packages

FILES = {
    # licence notices are left out, comments further down are not
    "train": {
        "one/a.py": "# Licence\n\n# of the file\nimport one_of_many_more\n# why\n",
        "one/b.py": "def function_of_b():\n    return 'a line that others copy'",
        "one/copy_of_b.py": "def function_of_b():\n    return 'a line that others copy'\n",
        "one/tests/test_a.py": "x = 'left_out'\n",
        "one/_vendor/six.py": "x = 'left_out'\n",
        "one/data_pb2.py": "x = 'left_out'\n",
        "one/generated.py": "# Automatically generated from a schema\nx = 'left_out'\n",
        "one/table.py": "TABLE = [" + "0x12, " * 20 + "]\n",
        "one/long_line.py": f"LEFT_OUT = '{'left out ' * 50}'\n",
        "one/long_file.py": "x = 'left_out'\n" * 20_000,
        "one/accent.py": "x = 'left_out \u00e9'\n",
        "one/short_lines.py": "x = 'left_out'\n",
        "one/only_notice.py": "# left_out\n",
        "one/left_out.txt": "left_out\n",
    },
    # shares half of its long lines with one/b.py: no near copy yet
    "valid": {
        "two/a.py": "    return 'a line that others copy'\n    return 'a line of its own'\n",
        # all but one of its long lines
        "two/b.py": "def function_of_b():\n    return 'a line that others copy'\n    # its own\n",
    },
    "test": {"three/a.py": "import three_of_them\n"},
}


def add_wheel(folder, name, files):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return f"{name}==1.0 {name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def packages(tmp_path):
    # training comes first, wherever the list has it
    lines = [add_wheel(tmp_path, part, FILES[part]) for part in ("test", "valid", "train")]
    path = tmp_path / "list.txt"
    path.write_text("# a comment\n\n" + "".join(lines))
    return path


def test_what_people_wrote_is_read_once(packages):
    assert _packages.read_packages(packages, packages.parent) == {
        "train": ["import one_of_many_more\n# why\n", FILES["train"]["one/copy_of_b.py"]],
        "valid": [FILES["valid"]["two/a.py"]],
        "test": ["import three_of_them\n"],
    }


def test_letters_decide_what_is_a_table():
    assert _packages.is_written("a.py", "a" * 56 + " " + "0" * 44 + "\n")
    assert not _packages.is_written("a.py", "a" * 54 + " " + "0" * 46 + "\n")


def test_pip_fetches_what_is_missing_by_its_hash(packages, tmp_path, monkeypatch):
    wanted = _packages.read_list(packages)
    requirements, elsewhere = [], tmp_path / "elsewhere"
    elsewhere.mkdir()
    missing = elsewhere / "train-1.0-py3-none-any.whl"
    (tmp_path / missing.name).rename(missing)

    def pip(command, **_):
        with open(command[command.index("--requirement") + 1]) as file:
            requirements.append(file.read())
        missing.rename(tmp_path / missing.name)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(_packages.subprocess, "run", pip)
    assert set(_packages.fetch(wanted, tmp_path)) == {package.digest for package in wanted}
    assert requirements == [f"train==1.0 --hash=sha256:{wanted[0].digest}\n"]


def test_a_wheel_that_pip_cannot_get_is_named(packages, tmp_path):
    # no such version is anywhere, and pip may look nowhere
    (tmp_path / "train-1.0-py3-none-any.whl").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(ValueError, match=r"--packages: pip could not download train==1\.0"):
            _packages.read_packages(packages, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("valid==1.0 valid", "valid==1.0 check", 'line 4: "valid==1.0 check '),
        ("valid==1.0 valid", "valid>=1.0 valid", 'line 4: "valid>=1.0 valid '),
        ("valid==1.0 valid", "valid==1.0 train", "no package has the part valid"),
    ],
    ids=["part", "version", "no valid"],
)
def test_a_wrong_list_is_refused(packages, old, new, message):
    text = packages.read_text()
    packages.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)):
        _packages.read_list(packages)
