"""fairseq-hydra-train: presets and the losses are those of fairseq-train, and of recipes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import ALL, PLUGIN, USER_DIR, run
from tests.end_to_end.results import EXACT, assert_equal, parameters
from tests.recipes import EXAMPLES, words

NARROW = {
    "model.decoder_layers": 2,
    "model.decoder_embed_dim": 16,
    "model.decoder_attention_heads": 2,
    "task.tokens_per_sample": 8,
    "dataset.batch_size": 4,
}
# of each paper: a recipe, and what makes it small
TINY = {
    "transformer_xl/enwik8_base": {
        **NARROW,
        "model.decoder_ffn_embed_dim": 8,
        "task.tokens_per_sample_valid": 8,
        "dataset.validate_interval": 1,
    },
    "all_attention/enwik8_small": {
        **NARROW,
        "model.persistent_vectors": 4,
        "model.attention_span": 12,
        "dataset.batch_size_valid": 10,
    },
    "product_key_memory/english_16k": {
        **NARROW,
        "model.decoder_ffn_embed_dim": 8,
        "model.memory_layers": "2",
        "model.memory_slots": 64,
        "model.memory_knn": 4,
        "model.memory_query_dim": 8,
        "dataset.validate_interval": 1,
    },
    "weighted_transformer/multi30k_en_de": {
        "model.encoder_layers": 1,
        "model.decoder_layers": 1,
        "model.encoder_embed_dim": 16,
        "model.decoder_embed_dim": 16,
        "dataset.max_tokens": 200,
        "lr_scheduler.warmup_updates": 2,
    },
}
TASKS = {
    "transformer_xl": "segment_language_modeling",
    "all_attention": "segment_language_modeling",
    "product_key_memory": "language_modeling",
    "weighted_transformer": "translation",
}
ON_CPU = {"common.cpu": "true", "dataset.num_workers": 0, "optimization.max_update": 2}


# one of them in make test
PARAMS = [pytest.param(name, marks=[pytest.mark.slow] if n else []) for n, name in enumerate(TINY)]


@pytest.fixture(scope="module", params=PARAMS)
def trained(request, tmp_path_factory):
    """A recipe in small, trained by its command and from its YAML: recipe, data, folders."""
    recipe, folder = request.param, tmp_path_factory.mktemp("recipe")
    room, name = recipe.split("/")
    source = request.getfixturevalue("pairs" if room == "weighted_transformer" else "data")
    values = {**ON_CPU, **TINY[recipe]}
    flags = []
    for option, value in values.items():
        flags += [f"--{option.partition('.')[2].replace('_', '-')}"]
        flags += [str(value)] if value != "true" else []
    places = {"data": str(source.parent), "checkpoints": str(folder / "train")}
    (folder / "train").mkdir()
    given = words(room, name, "train", *flags, **places)
    # the commands are forked from a process that has loaded the plugin
    given[given.index("--user-dir") + 1] = PLUGIN
    run("fairseq-train", *given, folder=folder)
    configuration = ("--config-dir", EXAMPLES / room / "config", "--config-name", name)
    given = {"task.data": source, "checkpoint.save_dir": "hydra", "common.user_dir": PLUGIN}
    given |= {f"++{option}": value for option, value in values.items()}
    overrides = (f"{option}={value}" for option, value in given.items())
    run("fairseq-hydra-train", *configuration, *overrides, folder=folder)
    return recipe, source, folder / "train", folder / "hydra"


@pytest.mark.slow
def test_a_sweep_trains_each_model_from_its_beginning(data, tmp_path):
    """One process trains them all, in folders of Hydra's own: paths have to be absolute.

    It is the command itself, without what makes Hydra quick in other tests.
    """
    recipe = "transformer_xl/enwik8_base"
    values = {**ON_CPU, **TINY[recipe], "task.data": data, "common.user_dir": PLUGIN}
    values |= {"checkpoint.save_dir": f"{tmp_path}/lr_${{optimization.lr.0}}"}
    overrides = (f"++{option}={value}" for option, value in values.items())
    room, name = recipe.split("/")
    configuration = ("--config-dir", EXAMPLES / room / "config", "--config-name", name)
    # the first is the better one
    sweep = ("-m", "optimization.lr=[0.01],[0.000001]", *overrides)
    command = Path(sys.executable).with_name("fairseq-hydra-train")
    subprocess.run([*map(str, (command, *configuration, *sweep))], cwd=tmp_path, check=True)
    losses = []
    for rate in ("0.01", "1e-06"):
        path = tmp_path / f"lr_{rate}" / "checkpoint_best.pt"
        state = torch.load(path, weights_only=True)
        assert state["optimizer_history"][-1]["num_updates"] == 2
        assert state["extra_state"]["best"] == state["extra_state"]["val_loss"]
        losses.append(state["extra_state"]["best"])
    assert losses[0] < losses[1]


def test_a_recipes_yaml_gives_the_losses_of_its_command(trained):
    *_, by_command, by_hydra = trained
    assert_equal(parameters(by_hydra), parameters(by_command), **EXACT)
    losses = []
    for folder in (by_command, by_hydra):
        state = torch.load(folder / "checkpoint_last.pt", weights_only=True)["extra_state"]
        losses.append((state["val_loss"], state["metrics"]["train"]))
    for state in losses:
        # how long it took
        for timed in ("wps", "ups", "wall", "train_wall", "gb_free"):
            state[1][:] = [meter for meter in state[1] if meter[1] != timed]
    assert losses[0] == losses[1]
    assert "loss" in [meter[1] for meter in losses[0][1]]


def test_fairseq_validate_finds_the_loss_of_validation(trained):
    recipe, source, folder, _ = trained
    task = TASKS[recipe.split("/")[0]]
    path = folder / "checkpoint_last.pt"
    size = ("--batch-size", 10) if task != "translation" else ("--max-tokens", 200)
    options = ("--cpu", *ALL, "--log-format", "simple")
    printed = run(
        "fairseq-validate", source, *USER_DIR, "--task", task, "--path", path, *size, *options
    )
    state = torch.load(path, weights_only=True)["extra_state"]
    found = re.findall(r"\| valid \| .*?\bloss ([\d.]+)", printed)
    assert [float(loss) for loss in found] == [state["val_loss"]]
