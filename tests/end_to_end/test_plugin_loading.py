"""The plugin loads by path, installed, twice and in spawned workers; a bad fairseq is explained."""

import shutil
import subprocess
import sys
from argparse import Namespace

import pytest
from fairseq import utils
from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_plugins
from tests.end_to_end.commands import PLUGIN, ROOT, environment

CHECK = """
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from fairseq.criterions import CRITERION_REGISTRY
import fairseq_plugins
assert "segment_language_modeling" in TASK_REGISTRY
assert "all_attention_lm_tiny" in ARCH_MODEL_REGISTRY
assert "segment_loss" in CRITERION_REGISTRY
print("loaded from", fairseq_plugins.__path__[0])
"""
LOAD = """
import argparse, sys
from fairseq import utils
def load(path):
    utils.import_user_module(argparse.Namespace(user_dir=path))
"""


def python(script, *words, path="", cwd="/"):
    """Run a script from a folder that knows nothing of the repository."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(PYTHONPATH=str(path)),
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Folder that holds a copy of the package, installed with pip from a copy of the source."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(PLUGIN, source / "fairseq_plugins")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "requirements"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    target = tmp_path_factory.mktemp("site")
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--target", target, source],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
def test_from_an_installed_copy(installed):
    done = python(LOAD + "load(sys.argv[1])" + CHECK, installed / "fairseq_plugins")
    assert done.stdout.strip() == f"loaded from {installed}/fairseq_plugins", done.stderr


@pytest.mark.slow
def test_by_import_from_an_installed_copy_and_then_by_no_other_path(installed):
    script = "import fairseq_plugins" + CHECK + LOAD + "load(sys.argv[1])"
    done = python(script, PLUGIN, path=installed)
    assert done.stdout.strip() == f"loaded from {installed}/fairseq_plugins", done.stderr
    assert f"Failed to import --user-dir={PLUGIN}" in done.stderr


def test_by_import_and_twice_by_path(monkeypatch):
    for _ in range(2):
        monkeypatch.setattr(utils.import_user_module, "memo", set(), raising=False)
        utils.import_user_module(Namespace(user_dir=str(PLUGIN)))
    assert fairseq_plugins.__path__ == [str(PLUGIN)]
    assert "all_attention_lm_tiny" in ARCH_MODEL_REGISTRY


@pytest.mark.slow
def test_by_path_in_a_spawned_worker(tmp_path):
    # fairseq spawns one process a GPU, and each of them imports --user-dir anew
    check = "".join(f"    {line}\n" for line in CHECK.splitlines())
    load = "".join(f"    {line}\n" for line in (LOAD + "load(path)").splitlines())
    (tmp_path / "spawned.py").write_text(
        f"import multiprocessing, sys\ndef work(path):\n{load}{check}"
        "if __name__ == '__main__':\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    worker = spawn.Process(target=work, args=sys.argv[1:])\n"
        "    worker.start()\n"
        "    worker.join()\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "spawned.py", PLUGIN],
        capture_output=True,
        text=True,
        env=environment(PYTHONPATH=""),
        cwd=tmp_path,
    )
    assert done.stdout.strip() == f"loaded from {PLUGIN}", done.stderr


IMPORTS = """
import logging, sys
def state():
    root = logging.getLogger()
    return "fairseq" in sys.modules, root.level, root.handlers
before = state()
import fairseq_plugins.modules
print(state() == before)
from fairseq_plugins import load
print(state() == (True, *before[1:]))
"""
FILE_FIRST = """
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from fairseq.models import ARCH_MODEL_REGISTRY
print("transformer_xl_tiny" in ARCH_MODEL_REGISTRY)
"""


@pytest.mark.slow
def test_layers_import_no_fairseq_and_nothing_changes_logging():
    done = python(IMPORTS, path=ROOT)
    assert done.stdout.split() == ["True", "True"], done.stderr


@pytest.mark.slow
def test_any_file_may_be_imported_first():
    assert python(FILE_FIRST, path=ROOT).stdout.split() == ["True"]


def test_an_old_fairseq_is_explained(tmp_path):
    (tmp_path / "fairseq.py").write_text("__version__ = '0.10.2'\n")
    done = python("import fairseq_plugins, fairseq", path=f"{tmp_path}:{ROOT}")
    assert "fairseq_plugins needs fairseq 0.12, and 0.10.2 is installed: pip" in done.stderr
