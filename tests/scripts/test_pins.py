"""Every requested package is pinned to exactly one version, which meets the request."""

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


def test_set_up_and_the_extras_name_what_is_pinned():
    script = (ROOT / "scripts" / "set_up.sh").read_text(encoding="utf-8")
    (named,) = re.findall(r'--constraint "\$pins" (.*)', script)
    assert {"pip", "uv", *map(canonicalize_name, named.split())} <= set(pinned())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name for names in project["optional-dependencies"].values() for name in names}
    for extra in map(Requirement, extras - {"faiss-gpu"}):
        assert extra.specifier.contains(pinned()[canonicalize_name(extra.name)]), extra
