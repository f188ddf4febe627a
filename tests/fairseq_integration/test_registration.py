"""What the plugin changes in modules that were imported before it: four things."""

import importlib
import json
import subprocess
import sys

import pytest

import fairseq_plugins
from tests.end_to_end.commands import ROOT, environment

# Train with fairseq alone; collect the attributes of all modules and of their classes, and the
# entries of registries and tables; then import the plugin, train, evaluate, and load models.
SNAPSHOT = """
import copyreg, importlib, json, logging, sys, types
from pathlib import Path
import fairseq, pytest, torch
from tests.end_to_end.commands import ALL, evaluate, run, train
for name in ("train", "eval_lm", "generate", "interactive", "validate", "hydra_train"):
    importlib.import_module(f"fairseq_cli.{name}")
folder = Path(sys.argv[1])
(folder / "text.txt").write_text("a b c d\\n" * 20)
words = ["--only-source", "--destdir", folder / "data"]
for part in ("train", "valid", "test"):
    words += [f"--{part}pref", folder / "text.txt"]
run("fairseq-preprocess", *words)
words = "--arch transformer_lm --optimizer sgd --lr 0.1 --max-update 2 --batch-size 2 --cpu"
words += " --decoder-layers 1 --decoder-embed-dim 8 --decoder-ffn-embed-dim 8 --no-save"
words += " --tokens-per-sample 8 --decoder-attention-heads 2"
run("fairseq-train", folder / "data", "--task", "language_modeling", *words.split(), *ALL)
watched = ("fairseq", "fairseq_cli", "torch", "numpy", "hydra", "omegaconf", "argparse", "logging",
           "sys", "builtins", "importlib", "shutil", "os", "pickle", "copyreg", "copy", "zipfile")
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
    return objects

def settings():
    hooks = list(sys.meta_path), list(sys.path_hooks), sys.excepthook, sys.displayhook
    # other packages register their own classes when they are imported
    pickled = {k for k, v in copyreg.dispatch_table.items() if "fairseq" in f"{k} {v.__module__}"}
    return hooks, logging.root.level, list(logging.root.handlers), pickled

before, others, safe = attributes(), settings(), set(torch.serialization.get_safe_globals())

def report(functions_alone=False):
    after = attributes()
    changed = {name for name in before if before[name] is not after.get(name)}
    added = {
        name for name in after.keys() - before.keys()
        # submodules that were imported, and what is registered under a name of its own
        if not isinstance(after[name], types.ModuleType) and "[" not in name
    }
    # torch keeps the safe classes in a new set
    names = {name for name in changed | added if "safe_globals" not in name}
    if functions_alone:
        # numbers and caches change as fairseq and torch work
        names = {name for name in names if callable(before.get(name)) or callable(after.get(name))}
        names |= {"numpy.compat"} & added
    more = sorted(str(each) for each in set(torch.serialization.get_safe_globals()) - safe)
    print(json.dumps([sorted(names), settings() == others, more]))

import fairseq_plugins
for _ in range(2):
    fairseq_plugins.register()
    report()
train(folder / "data", folder / "saves", "--cpu", "--max-update", 2)
evaluate(folder / "data", folder / "saves" / "checkpoint_last.pt")
from tests.scripts.evaluate.saved_memory_models import write_all
write_all(folder)
for kind, data in (("streams", "text"), ("blocks", "text"), ("pairs", "pairs")):
    model = fairseq_plugins.load(folder / f"{kind}.pt", folder / data)
    model.score(*(["a b", "c"] if kind == "pairs" else ["ab"]))
    model.translate("a b") if kind == "pairs" else model.generate("ab", 3)
report(functions_alone=True)
"""


@pytest.mark.slow
def test_the_plugin_changes_four_things_once(tmp_path):
    words = [sys.executable, "-W", "ignore", "-c", SNAPSHOT, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    once, twice, used = map(json.loads, done.stdout.splitlines())
    assert once == twice == used
    changed, others_stay, safe = once
    assert changed == [
        "fairseq.checkpoint_utils.load_checkpoint",
        "fairseq.file_io.PathManager.copy",
        "numpy.compat",
    ]
    assert others_stay
    assert "<class 'omegaconf.dictconfig.DictConfig'>" in safe
    assert len(safe) >= 15


def test_register_names_a_package_that_fairseq_lacks(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'omegaconf'", name="omegaconf")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'omegaconf'$"):
        fairseq_plugins.register()
