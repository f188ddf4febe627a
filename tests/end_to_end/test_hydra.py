"""fairseq-hydra-train gives the same model as fairseq-train with a recipe."""

import pytest

from scripts import recipe
from tests.end_to_end.commands import LIMIT, PLUGIN, run, start
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
    options = ("--config-dir", tmp_path, "--config-name", "small", f"hydra.run.dir={tmp_path}")
    training = start("fairseq-hydra-train", *options)
    printed, _ = training.communicate(timeout=LIMIT)
    assert training.returncode == 0, printed
    assert_equal(parameters(by_hydra), parameters(by_command), **EXACT)
