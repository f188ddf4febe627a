"""fairseq-hydra-train: presets and the losses are those of fairseq-train, and of recipes."""

import re

import pytest
import torch
import yaml

from tests.end_to_end.commands import ALL, PLUGIN, USER_DIR, run
from tests.end_to_end.results import EXACT, assert_equal, parameters
from tests.recipes import EXAMPLES, words

COMMON = [
    *USER_DIR,
    *("--cpu", "--max-update", 3, "--lr", 0.01, "--lr-scheduler", "fixed", "--seed", 1),
    *("--disable-validation", *ALL),
]
CONFIGURED = {
    "common": {"user_dir": str(PLUGIN), "cpu": True, "seed": 1},
    "optimization": {"max_update": 3, "lr": [0.01]},
    "lr_scheduler": {"_name": "fixed"},
    "dataset": {
        "disable_validation": True,
        "required_batch_size_multiple": 1,
        "num_workers": 0,
    },
}
LANGUAGE = (
    [
        *("--task", "segment_language_modeling", "--tokens-per-sample", 8, "--batch-size", 4),
        *("--arch", "all_attention_lm_tiny", "--decoder-layers", 1, "--optimizer", "adam"),
        *("--criterion", "cross_entropy"),
    ],
    {
        "task": {"_name": "segment_language_modeling", "tokens_per_sample": 8},
        "dataset": {"batch_size": 4},
        "model": {"_name": "all_attention_lm_tiny", "decoder_layers": 1},
        "optimizer": {"_name": "adam"},
        "criterion": {"_name": "cross_entropy"},
    },
)
TRANSLATION = (
    [
        *("--task", "translation", "--source-lang", "en", "--target-lang", "de"),
        *("--arch", "weighted_transformer_tiny", "--encoder-layers", 1, "--max-tokens", 200),
        *("--optimizer", "adam_with_branch_weights", "--criterion", "cross_entropy"),
        *("--branch-residual", "sublayers", "--branch-warmup-updates", 2),
    ],
    {
        "task": {"_name": "translation", "source_lang": "en", "target_lang": "de"},
        "dataset": {"max_tokens": 200},
        "model": {
            "_name": "weighted_transformer_tiny",
            "encoder_layers": 1,
            "branch_residual": "sublayers",
            "branch_warmup_updates": 2,
        },
        "optimizer": {"_name": "adam_with_branch_weights"},
        "criterion": {"_name": "cross_entropy"},
    },
)

MEMORIES = (
    [
        *("--task", "translation", "--source-lang", "en", "--target-lang", "de"),
        *("--arch", "pkm_transformer_tiny", "--encoder-embed-dim", 64, "--max-tokens", 200),
        *("--optimizer", "adam_with_memory", "--criterion", "cross_entropy"),
    ],
    {
        "task": {"_name": "translation", "source_lang": "en", "target_lang": "de"},
        "dataset": {"max_tokens": 200},
        "model": {"_name": "pkm_transformer_tiny", "encoder_embed_dim": 64},
        "optimizer": {"_name": "adam_with_memory"},
        "criterion": {"_name": "cross_entropy"},
    },
)


@pytest.fixture(scope="module")
def pairs(make_pairs):
    """Folder of a binarized translation task with one dictionary."""
    return make_pairs("en", "de", "--joined-dictionary")


def hydra_train(folder, configuration, data, *words, **options):
    """Run fairseq-hydra-train with a configuration of its own."""
    given = {name: {**group} for name, group in CONFIGURED.items()}
    for name, group in configuration.items():
        given.setdefault(name, {}).update(group)
    given["task"]["data"] = str(data)
    given["checkpoint"] = {"save_dir": str(folder / "hydra")}
    text = "# @package _group_\n" + yaml.safe_dump(given)
    (folder / "train.yaml").write_text(text, encoding="utf-8")
    named = ("--config-dir", folder, "--config-name", "train")
    return run("fairseq-hydra-train", *named, *words, folder=folder, **options)


@pytest.mark.parametrize(
    ("text", "given"),
    [("data", LANGUAGE), ("pairs", TRANSLATION), ("pairs", MEMORIES)],
    ids=["spans", "branches", "memories"],
)
def test_both_commands_train_the_same_model(text, given, request, tmp_path):
    options, configuration = given
    source = request.getfixturevalue(text)
    run("fairseq-train", source, *COMMON, *options, "--save-dir", tmp_path / "train")
    hydra_train(tmp_path, configuration, source)
    trained, configured = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)
        for name in ("train", "hydra")
    )
    assert configured["optimizer_history"][-1]["num_updates"] == 3
    assert_equal(parameters(tmp_path / "hydra"), parameters(tmp_path / "train"), **EXACT)
    wanted = configuration["model"]
    for name, value in wanted.items():
        for state in (trained, configured):
            assert state["cfg"]["model"][name] == value


def test_a_sweep_trains_each_model_from_its_beginning(data, tmp_path):
    """One process trains them all, in folders of Hydra's own: paths have to be absolute."""
    _, configuration = LANGUAGE
    # the first is the better one
    sweep = ("-m", "optimization.lr=[0.01],[0.000001]", "dataset.disable_validation=false")
    folder = f"checkpoint.save_dir={tmp_path}/lr_${{optimization.lr.0}}"
    hydra_train(tmp_path, configuration, data, *sweep, folder)
    losses = []
    for rate in ("0.01", "1e-06"):
        path = tmp_path / f"lr_{rate}" / "checkpoint_best.pt"
        state = torch.load(path, weights_only=True)
        assert state["optimizer_history"][-1]["num_updates"] == 3
        assert state["extra_state"]["best"] == state["extra_state"]["val_loss"]
        losses.append(state["extra_state"]["best"])
    assert losses[0] < losses[1]


def test_a_misspelt_option_is_refused(pairs, tmp_path):
    _, configuration = TRANSLATION
    model = {**configuration["model"], "branch_residul": "sublayers"}
    printed = hydra_train(tmp_path, {**configuration, "model": model}, pairs, fails=True)
    assert "model.branch_residul is no option of weighted_transformer_tiny: the names" in printed


TINY = {
    "transformer_xl/enwik8_base": {
        "model.decoder_layers": 1,
        "model.decoder_embed_dim": 16,
        "model.decoder_attention_heads": 2,
        "model.decoder_ffn_embed_dim": 8,
        "task.tokens_per_sample": 8,
        "task.tokens_per_sample_valid": 8,
        "dataset.batch_size": 4,
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
ON_CPU = {"common.cpu": "true", "dataset.num_workers": 0, "optimization.max_update": 4}


@pytest.fixture(scope="module", params=TINY)
def trained(request, tmp_path_factory):
    """A recipe in small, trained by its command and from its YAML: recipe, data, folders."""
    recipe, folder = request.param, tmp_path_factory.mktemp("recipe")
    room, name = recipe.split("/")
    source = request.getfixturevalue("data" if room == "transformer_xl" else "pairs")
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
    task = {"transformer_xl/enwik8_base": "segment_language_modeling"}.get(recipe, "translation")
    path = folder / "checkpoint_last.pt"
    size = ("--batch-size", 10) if task != "translation" else ("--max-tokens", 200)
    options = ("--cpu", *ALL, "--log-format", "simple")
    printed = run(
        "fairseq-validate", source, *USER_DIR, "--task", task, "--path", path, *size, *options
    )
    state = torch.load(path, weights_only=True)["extra_state"]
    found = re.findall(r"\| valid \| .*?\bloss ([\d.]+)", printed)
    assert [float(loss) for loss in found] == [state["val_loss"]]
