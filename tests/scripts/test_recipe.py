"""Recipes are understood, build the models that they name, and run as they are printed."""

import ast
import json
import os
import re
import shlex
import signal
import threading
import time

import pytest
from fairseq import options

from scripts import recipe
from scripts.docs.tables import parse
from scripts.evaluate import translation
from scripts.prepare import __main__ as preparation
from tests.recipes import HYDRA, NAMES, count

pytestmark = pytest.mark.filterwarnings(HYDRA)

# parameters of the original code; for memories and translation, those on our pages
COUNTS = {
    "all_attention/adaptive_span_enwik8_large": 208_910_221,
    "all_attention/adaptive_span_enwik8_small": 38_538_541,
    "all_attention/adaptive_span_text8_small": 38_357_116,
    "all_attention/enwik8_large": 114_017_773,
    "all_attention/enwik8_small": 38_501_725,
    "all_attention/text8_large": 113_836_348,
    "all_attention/text8_small": 38_320_300,
    "all_attention/wt103": 132_493_746,
    "product_key_memory/12l_1024d": 213_121_024,
    "product_key_memory/16l_1024d_2_memories": 789_893_120,
    "product_key_memory/24l_1600d_3_memories": 2_044_423_360,
    "transformer_xl/enwik8_base": 41_055_949,
    "transformer_xl/enwik8_large": 277_232_845,
    "transformer_xl/lm1b_20l": 469_020_530,
    "transformer_xl/lm1b_base": 357_812_082,
    "transformer_xl/lm1b_large": 838_078_062,
    "transformer_xl/text8_large": 277_051_420,
    "transformer_xl/wt103_base": 151_107_538,
    "transformer_xl/wt103_large": 285_205_322,
    "weighted_transformer/wmt14_en_de_base": 63_082_688,
    "weighted_transformer/wmt14_en_de_base_as_written": 63_070_400,
    "weighted_transformer/wmt14_en_de_base_plain": 63_082_496,
    "weighted_transformer/wmt14_en_de_big": 214_245_760,
}
ABLATIONS = [name for _, name in NAMES if re.match("wt103_(?!base|large)", name)]


def words(name, action="train", *more, data="DATA", checkpoints="CHECKPOINTS"):
    """Return the arguments of the first command of an action."""
    paper, _, name = name.partition("/")
    return recipe.commands(paper, name, action, data, checkpoints, recipe.parse([*more]))[0][1:]


def parsed_options(name, *more, action="train"):
    """Return the options of an action's command, as fairseq or our command understands them."""
    parsed = recipe.parse(words(name, action, *more)[1:])
    return {key: value if value == recipe.YES else " ".join(value) for key, value in parsed.items()}


@pytest.mark.slow
@pytest.mark.parametrize("paper", recipe.PAPERS)
def test_each_recipe_builds_a_model_and_published_ones_have_the_published_size(paper):
    for name in (name for each, name in NAMES if each == paper):
        built = count(paper, name)
        assert built == COUNTS.get(f"{paper}/{name}", built), name


@pytest.mark.parametrize("paper", recipe.PAPERS)
def test_evaluation_commands_are_understood(paper):
    for name in (name for each, name in NAMES if each == paper):
        if not isinstance(recipe.load(paper, name)["evaluate"], dict):
            assert name.startswith("facts")  # whose training scores all facts itself
            continue
        for command in recipe.commands(paper, name, "evaluate"):
            if paper == "weighted_transformer":
                assert translation.parse(command[3:]).beam == 4
            else:
                parsed = options.parse_args_and_arch(options.get_eval_lm_parser(), command[1:])
                batches = parsed.required_batch_size_multiple
                assert batches == 1 or paper != "product_key_memory"


@pytest.mark.parametrize("paper", recipe.PAPERS)
def test_groups_are_of_recipes_that_there_are(paper):
    for group, patterns in recipe.read_recipes(paper)["groups"].items():
        assert all(recipe.find_recipes([f"{paper}/{pattern}"]) for pattern in patterns), group


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_sees_the_published_attention_length(name):
    published = recipe.load("transformer_xl", name)["published"]
    published = int(re.search(r"\((?:attention length )?(\d+)\)", published)[1])
    trained = parsed_options(f"transformer_xl/{name}")
    evaluated = parsed_options(f"transformer_xl/{name}", action="evaluate")
    assert ("half-loss" in trained) == ("half_loss" in name)
    absolute = "absolute" in trained.get("positions", "")
    if trained.get("mem-len") == "0" or absolute:
        assert "model-overrides" not in evaluated
        length = int(evaluated["tokens-per-sample"]) + int(evaluated["extended-context"])
        assert not absolute or length <= int(trained["tokens-per-sample"])
    else:
        overrides = ast.literal_eval(evaluated["model-overrides"])
        assert overrides["same_length"]
        length = overrides["mem_len"]
    assert length == published


@pytest.mark.parametrize("name", [name for _, name in NAMES if name.startswith("wmt14")])
def test_wmt14_has_the_schedule_of_the_paper(name):
    parsed = parse(words(f"weighted_transformer/{name}"))
    width = parsed.decoder_embed_dim
    # learning rate of update t: d^-0.5 * min(t^-0.5, t * 4000^-1.5)
    assert parsed.lr == [pytest.approx(width**-0.5 * 4000**-0.5, rel=1e-5)]
    assert parsed.warmup_init_lr == pytest.approx(width**-0.5 * 4000**-1.5, rel=1e-5)
    assert parsed.max_tokens * parsed.update_freq[0] == 25_000
    frozen = getattr(parsed, "freeze_branch_weights_after", None)
    assert frozen in (None, parsed.max_update - 10_000)


def test_options_after_the_action_win():
    name = "product_key_memory/16l_1024d_2_memories"
    assert "fp16" not in parsed_options(name)
    half = parsed_options(name, "--fp16", "--memory-layers", "3,5", "--lr=0.1", "--seed", "2")
    assert half["fp16-no-flatten-grads"] == recipe.YES
    assert (half["memory-layers"], half["lr"], half["seed"]) == ("3,5", "0.1", "2")
    assert words(name, "train", "--lr", "0.1").count("--lr") == 1
    # flags without value, and their opposite
    name = "product_key_memory/english_16k_norm"
    assert "memory-query-batch-norm" not in parsed_options(name, "--memory-query-batch-norm", "no")
    # what follows -- comes last
    name = "weighted_transformer/wmt14_en_de_2l_table3"
    assert words(name, "evaluate", "--beam", "2", "--", "--seed", "2")[-3:] == ["--", "--seed", "2"]
    assert translation.parse(words(name, "evaluate", "--beam", "2")[2:]).beam == 2


@pytest.fixture
def commands_run(monkeypatch, tmp_path):
    """Return the words of the commands that recipes would run, in a folder with data, D."""
    run = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "D" / "bin").mkdir(parents=True)
    monkeypatch.setattr(recipe, "run", lambda words, log=None: run.append(words))
    return run


def test_what_is_shown_is_what_runs(commands_run, capsys, tmp_path):
    name, folder = "weighted_transformer/wmt14_en_de_base", str(tmp_path / "it's C")
    assert recipe.main([name, "show", "D", folder, "--max-update", "9"]) == 0
    # it can be pasted into a shell
    shown = capsys.readouterr().out.replace("\\\n", " ").splitlines()
    shown = [shlex.split(line) for line in shown if line and line[0] != "#"]
    recipe.main([name, "prepare", "D"])
    recipe.main([name, "train", "D", folder, "--max-update", "9"])
    recipe.main([name, "evaluate", "D", folder])
    assert [line for line in shown if line[0] != "mkdir"] == commands_run


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            "weighted_transformer/multi30k_en_de prepare D2 --input T",
            "--input is for a text in one",
        ),
        ("transformer_xl/enwik8_huge train D C", "there is no recipe transformer_xl/enwik8_huge"),
        ("transformer_xl/enwik8_base finish D C", "enwik8_base has no action finish"),
        ("transformer_xl/enwik8_huge", "there is no recipe transformer_xl/enwik8_huge (did you"),
        ("transformer_xl/ptb --lr 1", "`transformer_xl/ptb` has no action"),
        ("transformer_xl/enwik8_base train D", "train takes DATA CHECKPOINTS"),
        ("transformer_xl/ptb finish D C", "there is no checkpoint_last.pt in C"),
        ("transformer_xl/ptb train NOWHERE C", "there is no NOWHERE/bin: run `prepare NOWHERE`"),
        ("transformer_xl/ptb show --seeds 1 2", "--seeds is for train"),
        ("results NOWHERE", "there is no folder NOWHERE"),
        ("results D", "D has no finished trainings"),
        ("results D --to-reach x", "--to-reach is x"),
    ],
)
def test_a_wrong_command_is_refused(line, text, capsys, commands_run):
    assert recipe.main(line.split()) == 1
    assert text in capsys.readouterr().err
    assert not commands_run


def test_the_list_has_the_names_with_a_part(capsys):
    assert recipe.main(["enwik8_b"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("transformer_xl/enwik8_base ")


def test_several_trainings_pass_over_what_is_complete(commands_run, tmp_path):
    line = ["all_attention/depth_small", "train", "D", str(tmp_path), "--seeds", "1", "2"]
    assert recipe.main(line) == 0
    assert len(commands_run) == 8
    folders = [command[command.index("--save-dir") + 1] for command in commands_run]
    assert folders[1] == str(tmp_path / "all_attention/english_characters/2")
    assert len(set(folders)) == 8
    assert all(command.count("--seed") == 1 for command in commands_run)
    assert recipe.main(line) == 0
    assert len(commands_run) == 8
    # of a training that goes on, the evaluation is out of date
    evaluation = [line[0], "evaluate", *line[2:]]
    assert recipe.main(evaluation) == recipe.main(evaluation) == 0
    assert len(commands_run) == 16
    assert recipe.main([*line, "--max-update", "9"]) == 0
    assert len(commands_run) == 24
    assert recipe.main(evaluation) == 0
    assert len(commands_run) == 32


def test_a_last_phase_is_averaged_anew(commands_run, tmp_path):
    for name in ("checkpoint_last.pt", "checkpoint_average.pt"):
        (tmp_path / name).touch()
    assert recipe.main(["transformer_xl/ptb", "finish", "D", str(tmp_path)]) == 0
    assert not (tmp_path / "checkpoint_average.pt").exists()
    # a recipe that does not average leaves the user's own average alone
    (tmp_path / "checkpoint_average.pt").touch()
    assert recipe.main(["transformer_xl/enwik8_base", "train", "D", str(tmp_path)]) == 0
    assert (tmp_path / "checkpoint_average.pt").exists()


@pytest.mark.parametrize("paper", sorted({*recipe.PAPERS} - {"weighted_transformer"}))
def test_a_text_of_the_user_takes_the_place_of_a_language_models_corpus(paper, tmp_path):
    for name in (name for each, name in NAMES if each == paper):
        (command,) = recipe.commands(paper, name, "prepare", "D", more={"input": [str(tmp_path)]})
        corpus, _, parsed = preparation.parse(command[3:])
        assert (corpus, parsed.input) == ("text", tmp_path)
        assert parsed.unit in ("words", "characters", "subwords", "sentencepiece")


def test_kill_ends_a_training_with_its_recipe(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(recipe, "SECONDS_TO_END", 0.1)
    child = tmp_path / "child"
    ends = f"trap 'touch {tmp_path}/ended; exit' TERM"
    child.write_text(f"#!/bin/sh\n{ends}\nsleep 1\necho > {tmp_path}/began\nsleep 9 & wait\n")
    child.chmod(0o755)
    monkeypatch.setattr(recipe, "program", lambda name: str(child))

    def kill():
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=kill).start()
    assert recipe.main(["transformer_xl/ptb", "train", str(tmp_path), str(tmp_path / "C")]) == 130
    assert (tmp_path / "ended").exists()


def test_results_are_in_the_unit_of_the_data_or_bleu_of_each_test_set(tmp_path):
    for unit, losses in (("characters", (3.0, 2.0, 2.25)), ("words", (8.0, 7.0, 7.5)), ("", ())):
        data = tmp_path / f"the {unit}"
        data.mkdir()
        if unit:
            (data / "units.json").write_text(json.dumps({"unit": unit}))
        folder = tmp_path / "out/paper" / (unit or "pairs") / "1"
        folder.mkdir(parents=True)
        (folder / "train.done").write_text(f"fairseq-train '{data}' \\\n    --x\n")
        (folder / "evaluate.done").touch()
        lines = []
        for update, loss in enumerate(losses, 1):
            figures = {"wps": 100 * update, "num_updates": update, "wall": 60 * update}
            valid = {"valid_loss": loss + 1, "valid_nll_loss": loss, "valid_num_updates": update}
            for kind, values in {"train_inner": figures, "valid": valid}.items():
                values = {name: str(value) for name, value in values.items()}
                lines.append(f"2026 | INFO | {kind} | {json.dumps(values)}")
        (folder / "train.log").write_text("\n".join(lines))
        # for pairs, the loss of another evaluation
        (folder / "evaluate.log").write_text("Loss (base 2): 2.1250, Perplexity: 4.36\n")
    for part, score in (("test", 27.34), ("test1", 25.0)):
        (folder / part).mkdir()
        scores = {"detokenized": {"score": score}, "tokenized": {"score": 99}, "gleu": 99}
        (folder / part / "scores.json").write_text(json.dumps(scores))
    rows = recipe.results_table(tmp_path / "out", 7.2).splitlines()[2:]
    assert [[cell.strip() for cell in row.strip("|").split("|")] for row in rows] == [
        ["paper/characters", "1", "3", "2.0000 bits", "2.1250 bits", "250", "3.0", "1", "1.0"],
        ["paper/pairs", "1", "0", "", "test 27.3, test1 25.0", "", "", "never", ""],
        ["paper/words", "1", "3", "128.00 ppl", "4.36 ppl", "250", "3.0", "2", "2.0"],
    ]
