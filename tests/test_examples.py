"""What holds of the command files of all examples."""

import subprocess

import pytest

import fairseq_plugins  # noqa: F401 (registers what the commands name)
from tests.command_files import EXAMPLES, HYDRA, of_room, training, write_stand_ins

RECIPES = [
    f"{room.name}/{name}"
    for room in sorted(EXAMPLES.iterdir())
    if room.is_dir()
    for name in of_room(room.name)
]
# what train takes after DATA and CHECKPOINTS
ARGUMENTS = {
    **{f"product_key_memory/{n}l_{d}d": "MEMORIES" for n in (12, 16, 24) for d in (1024, 1600)},
    "product_key_memory/ablation_size": "SLOTS",
    "product_key_memory/ablation_position": "LAYER",
    "product_key_memory/ablation_heads": "HEADS KNN",
    "product_key_memory/ablation_keys": "SLOTS KEYS",
    "product_key_memory/english": "SLOTS",
    "product_key_memory/capacity": "MODEL",
    "weighted_transformer/gating": "K",
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_is_in_its_readme(recipe):
    room, name = recipe.split("/")
    readme = (EXAMPLES / room / "README.md").read_text(encoding="utf-8")
    assert f"[`{name}.sh`]({name}.sh)" in readme


@pytest.mark.filterwarnings(HYDRA)
def test_options_after_those_of_the_file_win(tmp_path):
    stand_ins = write_stand_ins(tmp_path)
    given = ("--batch-size", "6", "--mem-len", "0", "--bf16")
    for recipe in ("transformer_xl/enwik8_base", "all_attention/enwik8_small"):
        cfg = training(stand_ins, recipe, *given)
        assert (cfg.dataset.batch_size, cfg.model.mem_len, cfg.common.bf16) == (6, 0, True)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("arguments", [["train"], ["dance", "A", "B"]])
def test_what_is_missing_is_answered_with_the_usage(recipe, arguments):
    done = subprocess.run(
        ["bash", EXAMPLES / f"{recipe}.sh", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 2
    given = f"{ARGUMENTS[recipe]} [options]" if recipe in ARGUMENTS else "[options]"
    assert f"bash examples/{recipe}.sh train DATA CHECKPOINTS {given}" in done.stderr
    assert "set -euo" not in done.stderr
