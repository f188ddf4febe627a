"""What importing the plugin changes in modules that were imported before it: four things."""

import importlib
import json
import subprocess
import sys

import pytest

import fairseq_plugins
from tests.end_to_end.commands import ROOT, environment

# Collect the attributes of all modules and of their classes, and the entries of their registries.
SNAPSHOT = """
import importlib, json, logging, sys, types
import fairseq, torch
for name in ("train", "eval_lm", "generate", "interactive", "validate", "hydra_train"):
    importlib.import_module(f"fairseq_cli.{name}")
watched = ("fairseq", "fairseq_cli", "torch", "numpy", "hydra", "omegaconf", "argparse", "logging",
           "sys", "builtins", "importlib", "shutil", "os", "pickle", "zipfile")
modules = {
    name: module for name, module in sys.modules.items()
    if name.partition(".")[0] in watched and isinstance(module, types.ModuleType)
}

def attributes():
    objects = {}
    for name, module in modules.items():
        for key, value in list(vars(module).items()):
            objects[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                objects.update({f"{name}.{key}.{k}": v for k, v in list(vars(value).items())})
            elif isinstance(value, dict) and key.isupper():
                objects.update({f"{name}.{key}[{k}]": v for k, v in list(value.items())})
    hooks = [list(sys.meta_path), list(sys.path_hooks), sys.excepthook, sys.displayhook]
    return objects, hooks, set(torch.serialization.get_safe_globals())

before, hooks, safe = attributes()
logged = logging.root.level, list(logging.root.handlers)
import fairseq_plugins
for _ in range(2):
    fairseq_plugins.register()
    after, hooks_after, safe_after = attributes()
    changed = {name for name in before if before[name] is not after.get(name)}
    added = {
        name for name in after.keys() - before.keys()
        # submodules that were imported, and what is registered under a name of its own
        if not isinstance(after[name], types.ModuleType) and "[" not in name
    }
    # torch keeps the safe classes in a new set
    names = [name for name in changed | added if "safe_globals" not in name]
    more = sorted(str(each) for each in safe_after - safe)
    assert logged == (logging.root.level, list(logging.root.handlers))
    print(json.dumps([sorted(names), hooks == hooks_after, more]))
"""


@pytest.mark.slow
def test_register_changes_four_things_once():
    words = [sys.executable, "-W", "ignore", "-c", SNAPSHOT]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    once, twice = map(json.loads, done.stdout.splitlines())
    assert once == twice
    changed, hooks_stay, safe = once
    assert changed == [
        "fairseq.checkpoint_utils.load_checkpoint",
        "fairseq.file_io.PathManager.copy",
        "numpy.compat",
    ]
    assert hooks_stay
    assert "<class 'omegaconf.dictconfig.DictConfig'>" in safe
    assert len(safe) >= 15


def test_register_names_a_package_that_fairseq_lacks(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'omegaconf'", name="omegaconf")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'omegaconf'$"):
        fairseq_plugins.register()
