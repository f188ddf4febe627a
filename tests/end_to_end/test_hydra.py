"""fairseq-hydra-train gives the same model as fairseq-train with a recipe."""

import pytest
import torch

from scripts import recipe
from tests.end_to_end.commands import LIMIT, PLUGIN, run, start
from tests.end_to_end.trainings import EXACT, assert_equal, parameters

# validate after the epoch, which a recipe may omit, in batches that the small data can fill
SMALL = (
    "--decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2 --tokens-per-sample 8 "
    "--decoder-ffn-embed-dim 8 --batch-size 4 --cpu --num-workers 0 --validate-interval 1 "
    "--batch-size-valid 10 --max-update 2"
)


def train_words(data, checkpoints):
    """Return the arguments of a recipe's training, made small."""
    places, options = (str(data.parent), str(checkpoints)), recipe.parse(SMALL.split())
    (command,) = recipe.commands("transformer_xl", "enwik8_base", "train", *places, options)
    return [str(PLUGIN) if word == "fairseq_plugins" else word for word in command[1:]]


def train_by_hydra(words, folder, *overrides):
    """Write the configuration of a training, and run the real command with it."""
    folder.mkdir(parents=True)
    (folder / "small.yaml").write_text(recipe.hydra_configuration(words), encoding="utf-8")
    options = ("--config-dir", folder, "--config-name", "small", *overrides)
    folders = (f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}")
    training = start("fairseq-hydra-train", *options, *folders)
    printed, _ = training.communicate(timeout=LIMIT)
    assert training.returncode == 0, printed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:[\\s\\S]*is validated against ConfigStore:UserWarning")
def test_a_recipes_yaml_trains_as_its_command_does(data, tmp_path):
    by_command, by_hydra = tmp_path / "command", tmp_path / "hydra"
    for folder in (by_command, by_hydra):
        folder.mkdir()
    run("fairseq-train", *train_words(data, by_command))
    train_by_hydra(train_words(data, by_hydra), tmp_path / "yaml")
    assert_equal(parameters(by_hydra), parameters(by_command), **EXACT)
    states = [
        torch.load(folder / "checkpoint_last.pt", weights_only=True)["extra_state"]
        for folder in (by_command, by_hydra)
    ]
    assert states[0]["val_loss"] == states[1]["val_loss"]


@pytest.mark.slow
def test_a_sweep_trains_each_model_from_its_beginning(data, tmp_path):
    """One process trains all models in Hydra's own folders, so paths have to be absolute."""
    values = {"task.data": data, "common.log_file": "null"}
    values |= {"checkpoint.save_dir": f"{tmp_path}/lr_${{optimization.lr.0}}"}
    overrides = (f"++{option}={value}" for option, value in values.items())
    # the first learning rate is the better one
    sweep = ("-m", "optimization.lr=[0.01],[0.000001]", *overrides)
    train_by_hydra(train_words(data, "checkpoints"), tmp_path / "yaml", *sweep)
    losses = []
    for rate in ("0.01", "1e-06"):
        path = tmp_path / f"lr_{rate}" / "checkpoint_best.pt"
        state = torch.load(path, weights_only=True)
        assert state["optimizer_history"][-1]["num_updates"] == 2
        assert state["extra_state"]["best"] == state["extra_state"]["val_loss"]
        losses.append(state["extra_state"]["best"])
    assert losses[0] < losses[1]
