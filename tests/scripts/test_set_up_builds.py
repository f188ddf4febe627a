"""Set-up with the real Python, pip and uv, on packages of a few lines."""

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.scripts.set_up_in_a_folder import PINS, copy_set_up, set_up

BACKEND = """
import importlib.metadata, os, uuid, zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "fairseq_fixed-1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        torch = importlib.metadata.version("torch")
        wheel.writestr("fairseq.py", f"build = {torch!r}, {uuid.uuid4().hex!r}")
        wheel.writestr("fairseq_fixed-1.dist-info/METADATA", METADATA)
        wheel.writestr("fairseq_fixed-1.dist-info/WHEEL", WHEEL)
        wheel.writestr("fairseq_fixed-1.dist-info/RECORD", "")
    return name
"""
METADATA = "Metadata-Version: 2.1\nName: {}\nVersion: {}\n"
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def write_wheel(folder, name, version, **scripts):
    """Write a wheel that holds scripts alone."""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}-{version}.dist-info/METADATA", METADATA.format(name, version))
        wheel.writestr(f"{name}-{version}.dist-info/WHEEL", WHEEL)
        wheel.writestr(f"{name}-{version}.dist-info/RECORD", "")
        for script, text in scripts.items():
            member = zipfile.ZipInfo(f"{name}-{version}.data/scripts/{script}")
            member.external_attr = 0o100755 << 16
            wheel.writestr(member, text)


def write_links(folder):
    """Write a folder of packages: the tools, torch for the CPU, and fairseq's sources."""
    folder.mkdir()
    for name in ("Cython", "ninja", "numpy", "setuptools", "wheel"):
        write_wheel(folder, name, "1")
    write_wheel(folder, "torch", "1+cpu")
    write_wheel(folder, "torch", "2")
    real_uv = Path(sys.executable).with_name("uv")
    write_wheel(folder, "uv", "1", uv=f'#!/bin/sh\nexec "{real_uv}" "$@"\n')
    backend = f"METADATA = {METADATA.format('fairseq-fixed', 1)!r}\nWHEEL = {WHEEL!r}\n{BACKEND}"
    project = '[build-system]\nrequires = ["torch"]\nbuild-backend = "backend"\n'
    with tarfile.open(folder / "fairseq_fixed-1.tar.gz", "w:gz") as archive:
        for name, text in (
            ("PKG-INFO", METADATA.format("fairseq-fixed", 1)),
            ("pyproject.toml", project + 'backend-path = ["."]\n'),
            ("backend.py", backend),
        ):
            member = tarfile.TarInfo(f"fairseq_fixed-1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.skipif(
    not Path(sys.executable).with_name("uv").exists(), reason="these tests run outside .venv"
)
def test_a_build_of_fairseq_is_kept_for_its_torch_alone(tmp_path):
    checkout = (tmp_path / "check out").resolve()
    copy_set_up(checkout)
    write_links(tmp_path / "links")
    environment = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "links"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
    }

    def build(torch):
        names = ("Cython", "ninja", "numpy", "setuptools", "wheel", "uv", "fairseq-fixed")
        pins = [f"{name}==1" for name in names] + [f"torch=={torch}"]
        (checkout / PINS).write_text("\n".join(pins))
        assert set_up(checkout, sys.executable, **environment)[::2] == (0, "")
        program = "import fairseq; print(*fairseq.build)"
        python = checkout / ".venv" / "bin" / "python"
        return subprocess.check_output([python, "-c", program], text=True).split()

    first = build("1")
    second = build("2")
    assert (first[0], second[0]) == ("1+cpu", "2")
    # from the cache
    assert build("1") == first
    assert set_up(checkout, sys.executable, **environment) == (0, "", "")
