"""Each kind of action of the recipes, small."""

import re

from scripts import recipe
from scripts.prepare import _binarize
from tests.end_to_end.commands import PLUGIN, run, run_here

# with few updates in each epoch
SMALL = (
    "--decoder-layers 1 --decoder-embed-dim 16 --decoder-attention-heads 2 --cpu "
    "--decoder-ffn-embed-dim 16 --tokens-per-sample 40 --extended-context 4 --batch-size 10 "
    "--num-workers 0 --max-epoch"
).split()


def run_action(words, log=None):
    """Run a command of a recipe in this process."""
    words = [str(PLUGIN) if word == "fairseq_plugins" else word for word in words]
    printed = run(*(words[2:] if words[0] == "python" else words))
    if log:
        log.write_text(printed, encoding="utf-8")


def test_each_kind_of_action_runs(data, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "run", run_action)
    monkeypatch.setattr(_binarize, "run_child", run_here)
    name, places = "transformer_xl/ptb", [str(data.parent), str(tmp_path / "out/ptb/1")]
    assert recipe.main([name, "train", *places, *SMALL, "2"]) == 0
    assert recipe.main([name, "finish", *places, *SMALL, "52"]) == 0
    assert recipe.main([name, "evaluate", *places, "--cpu"]) == 0
    row = recipe.results_table(tmp_path / "out").splitlines()[-1]
    assert len(re.findall(r" \d+\.\d+ (?:ppl|bits) ", row)) == 2
    prepared, text = tmp_path / "prepared", ["--input", str(data.parent), "--workers", "1"]
    line = ["transformer_xl/english_characters", "prepare", str(prepared), *text]
    assert recipe.main(line) == 0
    assert (prepared / "bin/train.idx").exists()
