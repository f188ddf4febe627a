"""fairseq-hydra-train gives the same model as fairseq-train with a recipe, also in sweeps."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import recipe
from tests.end_to_end.commands import LIMIT, PLUGIN, ROOT, environment, run, start
from tests.end_to_end.trainings import EXACT, assert_equal, parameters
from tests.recipes import HYDRA

# validate after the epoch, which a recipe may omit, in batches that the small data can fill
SMALL = (
    "--decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2 --tokens-per-sample 8 "
    "--decoder-ffn-embed-dim 8 --batch-size 4 --cpu --num-workers 0 --validate-interval 1 "
    "--batch-size-valid 10 --max-update 2"
)


def train_words(data, checkpoints):
    """Return the arguments of a recipe's training, made small."""
    checkpoints.mkdir()
    places, options = (str(data.parent), str(checkpoints)), recipe.parse(SMALL.split())
    (command,) = recipe.commands("transformer_xl", "enwik8_base", "train", *places, options)
    return [str(PLUGIN) if word == "fairseq_plugins" else word for word in command[1:]]


@pytest.mark.slow
@pytest.mark.filterwarnings(HYDRA)
def test_hydra_train_trains_as_the_recipes_command(data, tmp_path):
    by_command, by_hydra = tmp_path / "command", tmp_path / "hydra"
    run("fairseq-train", *train_words(data, by_command))
    configuration = recipe.hydra_configuration(train_words(data, by_hydra))
    (tmp_path / "small.yaml").write_text(configuration, encoding="utf-8")
    options = ("--config-dir", tmp_path, "--config-name", "small")
    training = start("fairseq-hydra-train", *options)
    printed, _ = training.communicate(timeout=LIMIT)
    assert training.returncode == 0, printed
    assert_equal(parameters(by_hydra), parameters(by_command), **EXACT)


@pytest.mark.slow
def test_the_pages_commands_train_and_sweep_in_new_folders(data, tmp_path):
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"```\n(mkdir [^`]*fairseq-hydra-train[^`]*)```", page)
    small = (
        "common.cpu=true dataset.num_workers=0 dataset.batch_size=4 task.tokens_per_sample=8 "
        "optimization.max_update=2 dataset.validate_interval_updates=0 model.decoder_layers=6 "
        "model.decoder_embed_dim=16 model.decoder_ffn_embed_dim=8 model.decoder_attention_heads=2"
    )
    places = {
        "DATA": data.parent,
        "CHECKPOINTS": tmp_path / "runs",
        "recipes": tmp_path / "recipes",
    }
    for word, place in places.items():
        script = script.replace(word, str(place))
    name = "--config-name english_16k_norm"
    script = script.replace(name, f"{name} {small}")
    variables = environment() | {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-ec", script], cwd=ROOT, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    folders = {path.parent.relative_to(tmp_path / "runs") for path in tmp_path.rglob("*_last.pt")}
    assert folders == {Path("."), Path("0.008"), Path("0.016")}
    assert [*tmp_path.rglob("multirun.yaml")] == [tmp_path / "runs" / "multirun.yaml"]
    for folder in folders:
        log = (tmp_path / "runs" / folder / "train.log").read_text(encoding="utf-8")
        assert len(re.findall(r'\[valid\].*"valid_loss"', log)) == 1
