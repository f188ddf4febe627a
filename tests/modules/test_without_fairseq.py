"""Without fairseq, Hydra and numba, layers compute the same and other imports say what to do."""

import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from packaging.requirements import Requirement

from tests.end_to_end.commands import PLUGIN, ROOT, environment
from tests.modules import every_layer

# starts three Python processes
pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "plain_pytorch" / "train.py"
MISSING = """
import importlib.util, json, sys
import fairseq_plugins.modules
names = ("fairseq", "fairseq_cli", "omegaconf", "hydra", "numba", "numpy")
there = [name for name in names if importlib.util.find_spec(name)]
errors = {}
for name in ("load", "python_interface.loading", "weighted_transformer.model"):
    package, _, wanted = f"fairseq_plugins.{name}".rpartition(".")
    try:
        exec(f"from {package} import {wanted}")
    except ImportError as error:
        errors[name] = [type(error).__name__, str(error)]
print(json.dumps([there, errors]))
"""


def distributions(*wanted):
    """Return the installed ones of these packages and all that they need, without extras."""
    found, wanted = {}, list(wanted)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # such as GPU libraries
            continue
        for requirement in map(Requirement, found[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found.values()


def link_packages(folder):
    """Fill a folder with links to this package, torch, numpy and what these need, not fairseq."""
    for distribution in distributions("torch", "numpy"):
        for name in {file.parts[0] for file in distribution.files}:
            if name not in ("..", "__pycache__") and not (folder / name).exists():
                (folder / name).symlink_to(distribution.locate_file(name))
    (folder / PLUGIN.name).symlink_to(PLUGIN)


def start(folder, *words):
    """Start ``python words`` in another folder, with only the packages in ``folder``."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # without site-packages
    words = [sys.executable, "-S", *map(str, words)]
    return subprocess.Popen(words, cwd="/", env=environment(PYTHONPATH=str(folder)), **pipes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Run three programs without fairseq; return their folder, and output and errors of each."""
    folder = tmp_path_factory.mktemp("plain")
    site = folder / "site"
    site.mkdir()
    link_packages(site)
    started = {
        "missing": start(site, "-c", MISSING),
        "layers": start(site, every_layer.__file__, folder / "layers.pt"),
        "example": start(site, EXAMPLE, ROOT / "docs" / "layers.md", "--updates", 100),
    }
    done = {name: (*process.communicate(), process.returncode) for name, process in started.items()}
    assert {name: errors for name, (_, errors, status) in done.items() if status} == {}
    return folder, done


def test_what_needs_fairseq_says_how_to_get_it(plain):
    there, errors = json.loads(plain[1]["missing"][0])
    assert there == ["numpy"]
    assert {kind for kind, _ in errors.values()} == {"ModuleNotFoundError"}
    for name in ("load", "python_interface.loading"):
        assert "needs fairseq 0.12, which is not installed: pip install " in errors[name][1]
    assert errors["weighted_transformer.model"][1] == "No module named 'fairseq'"


def test_layers_compute_what_they_do_with_fairseq_and_numba(plain):
    folder, done = plain
    found, expected = torch.load(folder / "layers.pt"), every_layer.outputs()
    # numba's loops add in another order
    memories = found.pop("memory"), expected.pop("memory")
    torch.testing.assert_close(*memories)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    (warning,) = done["layers"][1].splitlines()
    assert "No module named 'numba'" in warning
    assert "pip install '.[fast]'" in warning


def test_the_example_trains(plain):
    lines = plain[1]["example"][0].splitlines()
    assert [line.rpartition(": ")[0] for line in lines] == ["updates 1 to 50", "updates 51 to 100"]
    first, second = (float(line.rpartition(": ")[2].split()[0]) for line in lines)
    assert second < 0.85 * first
