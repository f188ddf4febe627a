"""A Python that has torch, numpy and what these need, and nothing else: no fairseq, no numba."""

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement

from tests.end_to_end.commands import PLUGIN, environment


def _distributions(names):
    """Those of the names that are installed, and all that they need, extras left out."""
    found, wanted = {}, list(names)
    while wanted:
        name = wanted.pop()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # such as the libraries of a GPU
            continue
        for requirement in map(Requirement, found[name].requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found.values()


def link_packages(folder):
    """Fill a folder with links to this package, and to the packages that it cannot do without."""
    for distribution in _distributions(["torch", "numpy"]):
        for name in {file.parts[0] for file in distribution.files}:
            if name not in ("..", "__pycache__") and not (folder / name).exists():
                (folder / name).symlink_to(distribution.locate_file(name))
    (folder / PLUGIN.name).symlink_to(PLUGIN)


def start(folder, *words):
    """Start ``python words`` with the packages in a folder alone, elsewhere."""
    return subprocess.Popen(
        # without site-packages
        [sys.executable, "-S", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env=environment(PYTHONPATH=str(folder)),
    )
