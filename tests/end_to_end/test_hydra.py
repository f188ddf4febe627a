"""fairseq-hydra-train gives the same models and losses as fairseq-train with a recipe."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import ALL, PLUGIN, USER_DIR, run
from tests.end_to_end.trainings import EXACT, assert_equal, parameters
from tests.recipes import EXAMPLES, words

NARROW = {
    "model.decoder_layers": 2,
    "model.decoder_embed_dim": 16,
    "model.decoder_attention_heads": 2,
    "task.tokens_per_sample": 8,
    "dataset.batch_size": 4,
}
MEMORY = {"slots": 64, "knn": 4, "query_dim": 8, "layers": "2"}
# for each paper: a recipe, its task, and options that make it small
TINY = {
    "transformer_xl/enwik8_base": (
        "segment_language_modeling",
        NARROW | {"model.decoder_ffn_embed_dim": 8},
    ),
    "all_attention/enwik8_small": (
        "segment_language_modeling",
        NARROW | {"model.persistent_vectors": 4, "model.attention_span": 12},
    ),
    "product_key_memory/english_16k": (
        "language_modeling",
        NARROW
        | {"model.decoder_ffn_embed_dim": 8}
        | {f"model.memory_{name}": value for name, value in MEMORY.items()},
    ),
    "weighted_transformer/multi30k_en_de": (
        "translation",
        {
            **{"model.encoder_layers": 1, "model.encoder_embed_dim": 16},
            **{"model.decoder_layers": 1, "model.decoder_embed_dim": 16},
            **{"dataset.max_tokens": 200, "lr_scheduler.warmup_updates": 2},
        },
    ),
}
# validate after the epoch, which a recipe may omit, in batches that the small data can fill
SHORT = {
    "common.cpu": "true",
    "dataset.num_workers": 0,
    "dataset.validate_interval": 1,
    "dataset.batch_size_valid": 10,
    "optimization.max_update": 2,
}


def yaml(recipe):
    paper, name = recipe.split("/")
    return ("--config-dir", EXAMPLES / paper / "config", "--config-name", name)


# make test runs only one of them
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(name, marks=[pytest.mark.slow] if n else []) for n, name in enumerate(TINY)],
)
def test_a_recipes_yaml_trains_as_its_command_does(recipe, tmp_path, corpora):
    task, values = TINY[recipe]
    paper, name = recipe.split("/")
    source, values = corpora["pairs" if task == "translation" else "text"], SHORT | values
    flags = []
    for option, value in values.items():
        flags += [f"--{option.partition('.')[2].replace('_', '-')}"]
        flags += [str(value)] if value != "true" else []
    by_command, by_hydra = tmp_path / "train", tmp_path / "hydra"
    by_command.mkdir()
    places = {"data": str(source.parent), "checkpoints": str(by_command)}
    given = words(paper, name, "train", *flags, **places)
    # the commands are forked from a process that has loaded the plugin from PLUGIN
    given[given.index("--user-dir") + 1] = PLUGIN
    run("fairseq-train", *given, folder=tmp_path)
    given = {"task.data": source, "checkpoint.save_dir": "hydra", "common.user_dir": PLUGIN}
    given |= {f"++{option}": value for option, value in values.items()}
    overrides = (f"{option}={value}" for option, value in given.items())
    run("fairseq-hydra-train", *yaml(recipe), *overrides, folder=tmp_path)
    assert_equal(parameters(by_hydra), parameters(by_command), **EXACT)
    path = by_command / "checkpoint_last.pt"
    losses = [
        torch.load(folder / path.name, weights_only=True)["extra_state"]["val_loss"]
        for folder in (by_command, by_hydra)
    ]
    size = ("--batch-size", 10) if task != "translation" else ("--max-tokens", 200)
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
    recipe = "transformer_xl/enwik8_base"
    values = SHORT | TINY[recipe][1] | {"task.data": data, "common.user_dir": PLUGIN}
    values |= {"checkpoint.save_dir": f"{tmp_path}/lr_${{optimization.lr.0}}"}
    overrides = (f"++{option}={value}" for option, value in values.items())
    # the first learning rate is the better one
    sweep = ("-m", "optimization.lr=[0.01],[0.000001]", *overrides)
    command = Path(sys.executable).with_name("fairseq-hydra-train")
    subprocess.run([*map(str, (command, *yaml(recipe), *sweep))], cwd=tmp_path, check=True)
    losses = []
    for rate in ("0.01", "1e-06"):
        path = tmp_path / f"lr_{rate}" / "checkpoint_best.pt"
        state = torch.load(path, weights_only=True)
        assert state["optimizer_history"][-1]["num_updates"] == 2
        assert state["extra_state"]["best"] == state["extra_state"]["val_loss"]
        losses.append(state["extra_state"]["best"])
    assert losses[0] < losses[1]
