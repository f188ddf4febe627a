"""The pinned versions: one of each, and what .venv holds."""

import importlib.metadata
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts import set_up

ROOT = Path(set_up.ROOT)
PINS = set_up.read_pins(ROOT)


def test_every_pin_names_one_version():
    for pin in PINS:
        (specifier,) = Requirement(pin).specifier
        assert specifier.operator == "==", pin
        assert "*" not in specifier.version, pin


@pytest.mark.parametrize("python_version", ["3.10", "3.11", "3.12", "3.13"])
def test_no_package_is_pinned_twice(python_version):
    requirements = [Requirement(pin) for pin in PINS]
    counts = Counter(
        requirement.name.lower()
        for requirement in requirements
        if not requirement.marker or requirement.marker.evaluate({"python_version": python_version})
    )
    assert set(counts.values()) == {1}
    assert {"pip", "torch", *map(str.lower, set_up.BUILD_TOOLS)} <= set(counts)


def test_the_fairseq_extra_is_the_pinned_one():
    (pin,) = set_up.select(PINS, ["fairseq-fixed"])
    assert f'"fairseq": ["{pin}"]' in (ROOT / "setup.py").read_text()


in_venv = pytest.mark.skipif(
    Path(sys.prefix) != ROOT / ".venv", reason="these tests run outside .venv"
)


@in_venv
def test_exactly_the_pins_are_installed():
    pinned = {}
    for requirement in map(Requirement, PINS):
        if not requirement.marker or requirement.marker.evaluate():
            pinned[requirement.name] = str(requirement.specifier).removeprefix("==")
    # A build of torch for one kind of machine adds, for example, "+cpu" to its version.
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in pinned}
    assert installed == pinned


@in_venv
def test_installed_packages_fit_together():
    check = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False
    )
    fairseq = set_up.titled(*set_up.select(PINS, ["fairseq-fixed"]))
    assert check.stdout == f"{fairseq} requires torchaudio, which is not installed.\n"
