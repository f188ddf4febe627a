"""The pinned versions: one of each, compiled from what is asked for, and what .venv holds."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def requirements(name):
    lines = (ROOT / "requirements" / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in (line.split("#")[0].strip() for line in lines) if line]


ASKED = requirements("development.in")
PINS = requirements("development.txt")


def pinned(environment=None):
    """Return the pinned versions for a Python, this one by default."""
    pins = [pin for pin in PINS if not pin.marker or pin.marker.evaluate(environment)]
    assert all(re.fullmatch(r"==[^*,]+", str(pin.specifier)) for pin in pins)
    versions = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}
    assert len(versions) == len(pins), "a package is pinned twice"
    return versions


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_what_is_asked_for_is_pinned_once(python):
    versions = pinned({"python_version": python, "python_full_version": f"{python}.0"})
    for asked in ASKED:
        assert asked.specifier.contains(versions[canonicalize_name(asked.name)]), asked


def test_what_set_up_names_is_pinned():
    script = (ROOT / "scripts" / "set_up.sh").read_text(encoding="utf-8")
    (named,) = re.findall(r'--constraint "\$pins" (.*)', script)
    assert {"pip", "uv", *map(canonicalize_name, named.split())} <= set(pinned())


def test_the_extras_are_what_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name for names in project["optional-dependencies"].values() for name in names}
    for extra in map(Requirement, extras - {"faiss-gpu"}):
        assert extra.specifier.contains(pinned()[canonicalize_name(extra.name)]), extra


def test_the_command_that_compiles_the_pins_is_told():
    head = (ROOT / "requirements" / "development.txt").read_text(encoding="utf-8").splitlines()
    command = head[1].removeprefix("#").strip()
    assert command.startswith("uv pip compile --universal --python-version 3.10 ")
    assert f".venv/bin/{command}\n" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


in_venv = pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="these tests run outside .venv"
)


@in_venv
def test_exactly_the_pins_are_installed():
    # A build of torch for one kind of machine adds, for example, "+cpu" to its version.
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in pinned()}
    assert installed == pinned()
