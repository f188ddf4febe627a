"""The plugin loads by path, installed, twice and in spawned workers, and changes no logging."""

import shutil
import subprocess
import sys

import pytest

from tests.end_to_end.commands import PLUGIN, ROOT, environment

LOAD = """
import argparse, sys
from fairseq import utils
utils.import_user_module(argparse.Namespace(user_dir=sys.argv[1]))
"""
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
TWICE = LOAD + "utils.import_user_module.memo.clear()" + LOAD + CHECK
# fairseq spawns one process per GPU, and each of them imports --user-dir anew
SPAWN = """
import multiprocessing, sys, work
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    worker = spawn.Process(target=work.work)
    worker.start()
    worker.join()
"""
LOGGING = """
import logging, sys
def state():
    root = logging.getLogger()
    return "fairseq" in sys.modules, root.level, root.handlers
before = state()
import fairseq_plugins.modules
assert state() == before
from fairseq_plugins import load
assert state() == (True, *before[1:])
"""
FILE_FIRST = """
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from fairseq.models import ARCH_MODEL_REGISTRY
assert "transformer_xl_tiny" not in ARCH_MODEL_REGISTRY
import fairseq_plugins
fairseq_plugins.register()
"""
AGAIN = """
import fairseq, fairseq_plugins, importlib
importlib.reload(fairseq_plugins)
fairseq_plugins.register()
"""


def python(*words, path="", cwd="/"):
    """Run Python outside of the repository."""
    variables = environment(PYTHONPATH=str(path))
    words = [sys.executable, *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=variables)


@pytest.mark.slow
def test_an_installed_copy_is_loaded_by_path_and_import_and_then_by_no_other_path(tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    shutil.copytree(PLUGIN, source / "fairseq_plugins")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "requirements"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    done = python("-m", "pip", "install", *offline, "--target", target, source)
    assert done.returncode == 0, done.stderr
    loaded = f"loaded from {target}/fairseq_plugins"
    done = python("-c", LOAD + CHECK, target / "fairseq_plugins")
    assert done.stdout.strip() == loaded, done.stderr
    done = python("-c", "import fairseq, fairseq_plugins" + CHECK + LOAD, PLUGIN, path=target)
    assert done.stdout.strip() == loaded, done.stderr
    assert f"Failed to import --user-dir={PLUGIN}" in done.stderr


@pytest.mark.slow
def test_the_plugin_is_loaded_by_path_in_a_spawned_worker(tmp_path):
    lines = (LOAD + CHECK).replace("sys.argv[1]", repr(str(PLUGIN))).splitlines()
    (tmp_path / "work.py").write_text("def work():\n" + "".join(f"    {line}\n" for line in lines))
    (tmp_path / "spawned.py").write_text(SPAWN)
    done = python("spawned.py", cwd=tmp_path)
    assert done.stdout.strip() == f"loaded from {PLUGIN}", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [TWICE, LOGGING + CHECK, FILE_FIRST + CHECK, AGAIN + CHECK],
    ids=["twice by path", "logging", "a file first", "reloaded"],
)
def test_the_plugin_is_loaded_in_any_order(script):
    done = python("-c", script, PLUGIN, path=ROOT)
    assert done.stdout.strip() == f"loaded from {PLUGIN}", done.stderr
