"""The command files of the Weighted Transformer: as published, and understood by fairseq."""

import argparse
import json
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.models.transformer import TransformerModel

from fairseq_plugins.weighted_transformer.branch_weights import BranchWeights
from fairseq_plugins.weighted_transformer.model import WeightedTransformer
from scripts.evaluate import translation as evaluate_translation
from scripts.plot import branch_weights as plot_branch_weights
from tests import tiny
from tests.command_files import (
    EXAMPLES,
    HYDRA,
    commands,
    dictionary,
    of_room,
    parameters,
    training,
    words,
    write_stand_ins,
)
from tests.end_to_end.commands import ROOT, run

pytestmark = pytest.mark.filterwarnings(HYDRA)

# target language; layers, width, branches, dropout; updates; parameters in millions, if the paper
# tells them
WEIGHTED_TRANSFORMER = {
    "weighted_transformer/wmt14_en_de_2l": ("de", 2, 512, 8, 0.1, 60_000, 36),
    "weighted_transformer/wmt14_en_de_4l": ("de", 4, 512, 8, 0.1, 60_000, 50),
    "weighted_transformer/wmt14_en_de_base": ("de", 6, 512, 8, 0.1, 60_000, 65),
    "weighted_transformer/wmt14_en_de_8l": ("de", 8, 512, 8, 0.3, 60_000, 80),
    "weighted_transformer/wmt14_en_de_big": ("de", 6, 1024, 16, 0.3, 250_000, 213),
    "weighted_transformer/wmt14_en_fr_base": ("fr", 6, 512, 8, 0.1, 60_000, None),
    "weighted_transformer/wmt14_en_fr_big": ("fr", 6, 1024, 16, 0.3, 250_000, None),
}
OTHERS = [f"weighted_transformer/{name}" for name in ("table3", "gating", "multi30k")]
SMALL = "weighted_transformer/wmt14_en_de_2l"
SYMBOLS = {"de": 37_000, "fr": 32_000}
README = (EXAMPLES / "weighted_transformer" / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    folder = write_stand_ins(tmp_path_factory.mktemp("commands"))
    # the command files evaluate with a script
    (folder / "python").symlink_to(folder / "fairseq-train")
    return folder


def evaluations(stand_ins, recipe, *more):
    """The options of all evaluations of a command file."""
    found = []
    for flag, module, *given in commands(stand_ins, recipe, "evaluate", *more):
        assert (flag, module) == ("-m", "scripts.evaluate.translation")
        found.append(evaluate_translation.parse(given))
    return found


def test_every_command_file_is_tested():
    names = {f"weighted_transformer/{name}" for name in of_room("weighted_transformer")}
    assert {*WEIGHTED_TRANSFORMER, *OTHERS} == names


def build(cfg, symbols, model=WeightedTransformer):
    """The model of a command, without its numbers."""
    joint = dictionary(symbols)
    task = argparse.Namespace(source_dictionary=joint, target_dictionary=joint)
    with torch.device("meta"):
        return model.build_model(cfg.model, task)


def row(recipe):
    """The cells of a command file in the README's table."""
    name = Path(recipe).name
    (line,) = (line for line in README.splitlines() if f"| [`{name}.sh`]({name}.sh) |" in line)
    return [cell.strip() for cell in line.strip("|").split("|")]


def trains_as_published(cfg, target, width, updates, optimizer="adam_with_branch_weights"):
    """Section 4.1; and what several GPUs and whole validations need."""
    assert (cfg.task._name, cfg.task.source_lang, cfg.task.target_lang) == (
        *("translation", "en"),
        target,
    )
    assert (cfg.criterion._name, cfg.criterion.label_smoothing) == (
        "label_smoothed_cross_entropy",
        0.1,
    )
    found = (cfg.optimizer._name, cfg.optimizer.adam_betas, cfg.optimizer.adam_eps)
    assert found == (optimizer, "(0.9, 0.98)", 1e-9)
    assert (cfg.optimizer.weight_decay, cfg.optimization.clip_norm) == (0, 0)
    schedule = cfg.lr_scheduler
    assert (schedule._name, schedule.warmup_updates) == ("inverse_sqrt", 4000)
    # of update t: d^-0.5 · min(t^-0.5, t · 4000^-1.5)
    assert cfg.optimization.lr == [pytest.approx(width**-0.5 * 4000**-0.5, rel=1e-5)]
    assert schedule.warmup_init_lr == pytest.approx(width**-0.5 * 4000**-1.5, rel=1e-5)
    assert cfg.dataset.max_tokens * cfg.optimization.update_freq[0] == 25_000
    assert cfg.optimization.max_update == updates
    assert cfg.dataset.required_batch_size_multiple == 1
    # the other one would add up gradients of κ and α in the precision of the model
    assert cfg.distributed_training.ddp_backend == "pytorch_ddp"
    assert cfg.common.log_format == "json"


@pytest.mark.parametrize("recipe", WEIGHTED_TRANSFORMER)
def test_models_are_trained_as_published(stand_ins, recipe):
    target, layers, width, branches, dropout, updates, published = WEIGHTED_TRANSFORMER[recipe]
    cfg = training(stand_ins, recipe)
    trains_as_published(cfg, target, width, updates)
    assert cfg.model.freeze_branch_weights_after == updates - 10_000
    assert cfg.common.log_file == str(stand_ins / "CHECKPOINTS" / "train.log")
    assert (cfg.model.dropout, cfg.model.attention_dropout) == (dropout, dropout)
    model = build(cfg, SYMBOLS[target])
    for stack in (model.encoder, model.decoder):
        assert (len(stack.layers), stack.embed_tokens.embedding_dim) == (layers, width)
    found = [weights for weights in model.modules() if isinstance(weights, BranchWeights)]
    # κ and α of each layer
    assert [weights.branches for weights in found] == [branches] * 4 * layers
    assert model.encoder.layers[0].fc1.weight.shape == (4 * width, width)
    assert model.decoder.output_projection.weight is model.encoder.embed_tokens.weight
    attention, feed_forward, norm = 4 * (width**2 + width), (8 * width + 5) * width, 2 * width
    encoder_layer = attention + feed_forward + 2 * norm
    decoder_layer = encoder_layer + attention + norm
    in_layers = layers * (encoder_layer + decoder_layer + 4 * branches)
    assert parameters(model) == SYMBOLS[target] * width + in_layers
    millions = parameters(model) / 1e6
    if published:
        # its vocabulary is not known
        assert millions == pytest.approx(published, rel=0.07)
    cells = row(recipe)
    assert cells[2:5] == [f"{layers}, {width}, {branches}", f"{dropout}", f"{updates:,}"]
    assert cells[5] == f"{millions:.0f}M" + (f" ({published}M)" if published else "")
    head = (EXAMPLES / f"{recipe}.sh").read_text(encoding="utf-8").split("\nset ")[0]
    assert f"{millions:.0f}M parameters." in head.replace("\n# ", " ")
    state = re.search(r"([\d.]+) GiB for weights", head.replace("\n# ", " "))[1]
    # weights, gradients and two moments, 4 bytes each
    assert state == f"{16 * parameters(model) / 2**30:.1f}"


@pytest.mark.parametrize("recipe", WEIGHTED_TRANSFORMER)
def test_the_plain_transformer_differs_as_published(stand_ins, recipe):
    target, layers, width, heads, dropout, weighted_updates, _ = WEIGHTED_TRANSFORMER[recipe]
    # table 2: another dropout where there are 8 layers
    dropout = 0.1 if layers == 8 else dropout
    updates = {60_000: 100_000, 250_000: 300_000}[weighted_updates]
    cfg = training(stand_ins, recipe, action="train-plain")
    trains_as_published(cfg, target, width, updates, optimizer="adam")
    assert (cfg.model.dropout, cfg.model.attention_dropout) == (dropout, dropout)
    weighted = training(stand_ins, recipe)
    for group in ("common", "dataset", "criterion", "lr_scheduler", "task", "checkpoint"):
        assert weighted[group] == cfg[group]
    plain = build(cfg, SYMBOLS[target], TransformerModel)
    ours = build(weighted, SYMBOLS[target])
    assert plain.decoder.output_projection.weight is plain.encoder.embed_tokens.weight
    assert parameters(plain) == pytest.approx(parameters(ours), rel=1e-3)
    for stack in (plain.encoder, plain.decoder):
        assert (len(stack.layers), stack.layers[0].self_attn.num_heads) == (layers, heads)


@pytest.mark.parametrize("recipe", WEIGHTED_TRANSFORMER)
def test_both_parts_are_translated_whole(stand_ins, recipe):
    target = WEIGHTED_TRANSFORMER[recipe][0]
    found = evaluations(stand_ins, recipe)
    assert [options.split for options in found] == ["test1", "test"]
    for options in found:
        assert options.data == ROOT / "DATA" / "bin"
        assert options.path == [stand_ins / "CHECKPOINTS" / "checkpoint_last.pt"]
        assert (options.source_lang, options.target_lang) == ("en", target)
        assert (options.beam, options.lenpen, options.branch_weights) == (4, 0.6, "learned")
        assert options.compound_split == (True if target == "de" else None)
        assert options.output == stand_ins / "CHECKPOINTS" / options.split


def test_table_3_replaces_the_weights(stand_ins):
    found = evaluations(stand_ins, "weighted_transformer/table3", "--examples", "2")
    assert [options.branch_weights for options in found] == ["learned", "random", "uniform"]
    for options in found:
        assert (options.split, options.compound_split, options.examples) == ("test1", True, 2)
        assert options.output == stand_ins / "CHECKPOINTS" / options.branch_weights
    given = [words(stand_ins, name, "train") for name in (SMALL, "weighted_transformer/table3")]
    assert given[0] == given[1]
    told = re.findall(r"^\| `(learned|random|uniform)` \| ([\d.]+) \|", README, re.MULTILINE)
    assert told == [("learned", "24.8"), ("random", "21.1"), ("uniform", "23.4")]


def test_gating_keeps_the_best_branches(stand_ins):
    cfg = training(stand_ins, "weighted_transformer/gating", "3", "--seed", "7")
    trains_as_published(cfg, "de", 512, 60_000)
    assert cfg.model.freeze_branch_weights_after == 50_000
    assert (cfg.model.branch_top_k, cfg.common.seed) == (3, 7)
    model = build(cfg, symbols=100)
    assert {m.top_k for m in model.modules() if isinstance(m, BranchWeights)} == {3}
    gated, plain = (evaluations(stand_ins, name) for name in ("weighted_transformer/gating", SMALL))
    assert gated == plain


def test_multi30k_compares_models_that_differ_in_the_architecture_alone(stand_ins):
    recipe = "weighted_transformer/multi30k"
    weighted = training(stand_ins, recipe, "--seed", "2")
    plain = training(stand_ins, recipe, "--seed", "2", action="train-plain")
    archs = (weighted.model._name, plain.model.arch)
    assert archs == ("weighted_transformer", "transformer")
    optimizers = (weighted.optimizer._name, plain.optimizer._name)
    assert optimizers == ("adam_with_branch_weights", "adam")
    assert weighted.model.freeze_branch_weights_after < weighted.optimization.max_update
    assert weighted.dataset.required_batch_size_multiple == 1
    for group in ("common", "dataset", "optimization", "criterion", "lr_scheduler", "task"):
        assert weighted[group] == plain[group]
    for name in ("adam_betas", "adam_eps", "weight_decay"):
        assert weighted.optimizer[name] == plain.optimizer[name]
    # those of fairseq's transformer are parsed, and lack what is not given
    shared = set(weighted.model) & set(vars(plain.model)) - {"arch", "optimizer", "_name"}
    assert {"dropout", "encoder_layers", "decoder_ffn_embed_dim"} <= shared
    for name in shared:
        assert getattr(weighted.model, name) == getattr(plain.model, name), name
    (found,) = evaluations(stand_ins, recipe)
    assert (found.split, found.compound_split, found.branch_weights) == ("test", True, "learned")


@pytest.mark.parametrize(
    ("target", "language", "compounds"),
    [("de", "de", True), ("fr", "fr", None), ("both", "de", None)],
)
def test_multi30k_has_other_targets(stand_ins, tmp_path, monkeypatch, target, language, compounds):
    recipe = "weighted_transformer/multi30k"
    monkeypatch.setenv("TARGET", target)
    assert training(stand_ins, recipe).task.target_lang == language
    (found,) = evaluations(stand_ins, recipe)
    assert (found.target_lang, found.compound_split) == (language, compounds)
    for part in ("train", "val", "test_2016_flickr"):
        for side, text in (("en", "a dog\n"), ("de", "ein Hund\n"), ("fr", "un chien\n")):
            (tmp_path / f"{part}.{side}").write_text(text, encoding="utf-8")
    output = tmp_path / "DATA"
    options = words(stand_ins, recipe, "prepare", data=tmp_path, checkpoints=output)
    prefix = Path(options[options.index("--train") + 1])
    assert options[options.index("--target-lang") + 1] == language
    assert prefix == (tmp_path / "DATA.joined" if target == "both" else tmp_path) / "train"
    if target == "both":
        texts = [prefix.with_suffix(f".{side}").read_text("utf-8") for side in ("en", "de")]
        assert texts == ["<2de> a dog\n<2fr> a dog\n", "ein Hund\nun chien\n"]


@pytest.mark.parametrize("k", [[], ["0"], ["two"], ["--bf16"]])
def test_gating_needs_the_number_of_branches(stand_ins, k):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        words(stand_ins, "weighted_transformer/gating", "train", *k)
    assert refused.value.returncode == 2
    assert "train DATA CHECKPOINTS K [options]" in refused.value.stderr


def write_pairs(folder):
    """Write 60 pairs of random words to train on, and 12 to validate."""
    folder.mkdir()
    torch.manual_seed(1)
    letters = tiny.dictionary()
    for language in ("en", "de"):
        letters.save(str(folder / f"dict.{language}.txt"))
        for split, pairs in (("train", 60), ("valid", 12)):
            prefix = folder / f"{split}.en-de.{language}"
            builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
            for sentence in tiny.tokens(pairs, 7):
                sentence[-1] = letters.eos()
                builder.add_item(sentence)
            builder.finalize(f"{prefix}.idx")


def test_a_command_file_trains_and_its_weights_are_drawn(stand_ins, tmp_path, capsys):
    write_pairs(tmp_path / "bin")
    checkpoints = tmp_path / "checkpoints"
    small = (
        "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 16 --cpu "
        "--decoder-ffn-embed-dim 16 --max-tokens 64 --update-freq 1 --max-update 5 --num-workers 0 "
        "--save-interval-updates 2 --keep-interval-updates -1 --branch-warmup-updates 2 "
        "--freeze-branch-weights-after 4"
    )
    places = {"data": tmp_path, "checkpoints": checkpoints}
    run("fairseq-train", *words(stand_ins, SMALL, "train", *small.split(), **places))
    results = []
    for name, source in (("--log", checkpoints / "train.log"), ("--checkpoint", checkpoints)):
        output = tmp_path / name
        assert plot_branch_weights.main([name, str(source), "--output", str(output)]) == 0
        found = json.loads((output / "branch_weights.json").read_text(encoding="utf-8"))
        results.append(found)
    logged, saved = results
    assert logged["updates"] == saved["updates"] == [2, 4, 5]
    layers = ["encoder1", "encoder2", "decoder1", "decoder2"]
    assert list(logged["layers"]) == list(saved["layers"]) == layers
    for layer in layers:
        for kind in ("kappa", "alpha"):
            exact = saved["layers"][layer][kind]
            assert exact[0] != exact[1]
            # frozen
            assert exact[1] == exact[2]
            for told, kept in zip(logged["layers"][layer][kind], exact, strict=True):
                assert told == pytest.approx(kept, abs=1e-4)
                assert sum(kept) == pytest.approx(1, abs=1e-6)
    assert "after 5 updates, the last of 3 that are drawn" in capsys.readouterr().out
