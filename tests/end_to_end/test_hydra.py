"""fairseq-hydra-train gives the same models and losses as fairseq-train with a recipe."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts import recipe
from tests.end_to_end.commands import ALL, PLUGIN, USER_DIR, run
from tests.end_to_end.trainings import EXACT, assert_equal, parameters

NARROW = (
    "--decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2 --tokens-per-sample 8 "
    "--batch-size 4 "
)
# for each paper: a recipe, and options that make it small
TINY = {
    "transformer_xl/enwik8_base": f"{NARROW} --decoder-ffn-embed-dim 8",
    "all_attention/enwik8_small": f"{NARROW} --persistent-vectors 4 --attention-span 12",
    "product_key_memory/english_16k": f"{NARROW} --decoder-ffn-embed-dim 8 --memory-slots 64 "
    "--memory-knn 4 --memory-query-dim 8 --memory-layers 2",
    "weighted_transformer/multi30k_en_de": "--encoder-layers 1 --encoder-embed-dim 16 "
    "--decoder-layers 1 --decoder-embed-dim 16 --max-tokens 200 --warmup-updates 2",
}
# validate after the epoch, which a recipe may omit, in batches that the small data can fill
SHORT = "--cpu --num-workers 0 --validate-interval 1 --batch-size-valid 10 --max-update 2 "


def train_words(name, data, checkpoints):
    """Return the arguments of the training of a recipe, made small."""
    paper, _, entry = name.partition("/")
    more = recipe.parse((SHORT + TINY[name]).split())
    (command,) = recipe.commands(paper, entry, "train", str(data), str(checkpoints), more)
    # the commands are forked from a process that has loaded the plugin from PLUGIN
    return [str(PLUGIN) if word == "fairseq_plugins" else word for word in command[1:]]


def write_yaml(words, folder):
    """Write the configuration of a training; return the options that name it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "small.yaml").write_text(recipe.hydra_configuration(words), encoding="utf-8")
    return "--config-dir", str(folder), "--config-name", "small"


# make test runs only one of them
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if n else []) for n, name in enumerate(TINY)],
)
@pytest.mark.filterwarnings("ignore:[\\s\\S]*is validated against ConfigStore:UserWarning")
def test_a_recipes_yaml_trains_as_its_command_does(name, tmp_path, corpora):
    translation = name.startswith("weighted")
    task = recipe.load(*name.split("/"))["options"]["task"]
    source = corpora["pairs" if translation else "text"]
    by_command, by_hydra = tmp_path / "train", tmp_path / "hydra"
    for folder in (by_command, by_hydra):
        folder.mkdir()
    run("fairseq-train", *train_words(name, source.parent, by_command), folder=tmp_path)
    options = write_yaml(train_words(name, source.parent, by_hydra), tmp_path / "yaml")
    run("fairseq-hydra-train", *options, folder=tmp_path)
    assert_equal(parameters(by_hydra), parameters(by_command), **EXACT)
    path = by_command / "checkpoint_last.pt"
    losses = [
        torch.load(folder / path.name, weights_only=True)["extra_state"]["val_loss"]
        for folder in (by_command, by_hydra)
    ]
    size = ("--max-tokens", 200) if translation else ("--batch-size", 10)
    options = ("--task", task, "--path", path, "--cpu", *ALL, "--log-format", "simple")
    printed = run("fairseq-validate", source, *USER_DIR, *options, *size)
    losses += map(float, re.findall(r"\| valid \| .*?\bloss ([\d.]+)", printed))
    assert len(losses) == 3
    assert len(set(losses)) == 1


@pytest.mark.slow
def test_a_sweep_trains_each_model_from_its_beginning(data, tmp_path):
    """One process trains all models in Hydra's own folders, so paths have to be absolute.

    This runs the real command, without the shortcuts of tests/quick_hydra.py.
    """
    name = "transformer_xl/enwik8_base"
    options = write_yaml(train_words(name, data.parent, "checkpoints"), tmp_path / "yaml")
    values = {"task.data": data, "common.log_file": "null"}
    values |= {"checkpoint.save_dir": f"{tmp_path}/lr_${{optimization.lr.0}}"}
    overrides = (f"++{option}={value}" for option, value in values.items())
    # the first learning rate is the better one
    sweep = ("-m", "optimization.lr=[0.01],[0.000001]", *overrides)
    command = Path(sys.executable).with_name("fairseq-hydra-train")
    subprocess.run([*map(str, (command, *options, *sweep))], cwd=tmp_path, check=True)
    losses = []
    for rate in ("0.01", "1e-06"):
        path = tmp_path / f"lr_{rate}" / "checkpoint_best.pt"
        state = torch.load(path, weights_only=True)
        assert state["optimizer_history"][-1]["num_updates"] == 2
        assert state["extra_state"]["best"] == state["extra_state"]["val_loss"]
        losses.append(state["extra_state"]["best"])
    assert losses[0] < losses[1]
