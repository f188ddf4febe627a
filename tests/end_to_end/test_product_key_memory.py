"""Product-key memories through fairseq's commands."""

import math
import re
import shutil

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from scripts.convert import average
from scripts.evaluate import memory_usage
from tests.end_to_end.commands import (
    ALL,
    NO_VALIDATION,
    USER_DIR,
    evaluate,
    loss,
    run,
    tokens_evaluated,
    train,
    train_on_two_workers,
    train_together,
)
from tests.end_to_end.results import assert_equal, parameters
from tests.product_key_memory.tiny import memories

TASK = (*USER_DIR, "--task", "language_modeling")
MEMORY = ("--memory-slots", 64, "--memory-heads", 2, "--memory-knn", 4, "--memory-query-dim", 8)
SMALL = ("--decoder-layers", 3, "--decoder-embed-dim", 16, "--decoder-attention-heads", 2)
OPTIMIZER = ("--optimizer", "adam_with_memory", "--lr", 0.003, "--memory-lr", 0.01)


def train_lm(data, folder, *options, updates=6):
    """Train a tiny language model on 8 blocks of 16 tokens in each update."""
    return run(
        "fairseq-train",
        data,
        *(*TASK, "--arch", "pkm_transformer_lm_tiny", *MEMORY),
        *(() if "--optimizer" in options else OPTIMIZER),
        *("--tokens-per-sample", 16, "--batch-size", 8, *ALL, "--max-update", updates),
        *("--save-dir", folder, "--log-format", "simple", "--no-epoch-checkpoints"),
        *options,
    )


def evaluate_lm(data, checkpoint, length=16, fails=False):
    """Run fairseq-eval-lm on the test split and return what it printed."""
    words = ("--path", checkpoint, "--gen-subset", "test", "--tokens-per-sample", length)
    return run("fairseq-eval-lm", data, *TASK, *words, *ALL, fails=fails)


def model_options(folder):
    """The model's options in the last checkpoint."""
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["cfg"]["model"]


def measured(printed):
    """Memory figures of each validation in a log, in order: dictionaries."""
    lines = [line for line in printed.splitlines() if "valid on 'valid' subset" in line]
    return [
        {key: float(value) for key, value in re.findall(r"(\w*memory\d+_\w+) ([\d.]+)", line)}
        for line in lines
    ]


@pytest.fixture(scope="module")
def language_model(data, tmp_path_factory):
    """Folder of a language model, and the log of its training."""
    folder = tmp_path_factory.mktemp("language model")
    return folder, train_lm(data, folder, "--validate-interval-updates", 3)


def test_a_language_model_is_trained_and_scored(data, language_model, test_tokens, tmp_path):
    path = language_model[0] / "checkpoint_last.pt"
    printed = evaluate_lm(data, path)
    assert tokens_evaluated(printed) == test_tokens
    assert loss(printed) < math.log2(24)
    # fairseq would leave the blocks out, and report a perplexity of 1
    printed = evaluate_lm(data, path, length=1024, fails=True)
    assert "--tokens-per-sample is 1024" in printed
    other = shutil.copytree(data, tmp_path / "other")
    lines = (other / "dict.txt").read_text().splitlines()
    (other / "dict.txt").write_text("\n".join(lines[::-1]) + "\n")
    printed = evaluate_lm(other, path, fails=True)
    assert "was trained with another dictionary than the source dictionary of DATA" in printed


def test_validation_measures_what_is_read(data, language_model):
    """The last figures of the log are those of the checkpoint over the same data."""
    folder, printed = language_model
    found = measured(printed)
    assert len(found) == 2
    path = str(folder / "checkpoint_last.pt")
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [path], arg_overrides={"data": str(data)}
    )
    (memory,) = memories(model)
    memory.usage = MemoryUsage(64, memory.heads)
    task.load_dataset("valid")
    batches = task.get_batch_iterator(task.dataset("valid"), max_sentences=3)
    with torch.no_grad():
        for batch in batches.next_epoch_itr(shuffle=False):
            model.decoder.eval()(batch["net_input"]["src_tokens"])
    reads = memory.usage.total()
    assert found[-1] == {
        "memory3_usage": round(100 * usage(reads), 2),
        "memory3_kl": pytest.approx(kl_from_uniform(reads), abs=2e-4),
    }


def test_other_optimizers_train_the_values_too(data, tmp_path, test_tokens):
    """By the model's own name, which fairseq loads in another way, and with dense gradients."""
    model = ("--arch", "pkm_transformer_lm", *SMALL, "--decoder-ffn-embed-dim", 32)
    placed = ("--memory-layers", "1,3", "--memory-interleave", "--memory-value-dim", 8)
    printed = train_lm(
        data,
        tmp_path,
        *model,
        *(*placed, "--optimizer", "adam", "--lr", 0.003),
        *("--no-decoder-learned-pos", "--checkpoint-activations"),
    )
    assert [sorted(figures) for figures in measured(printed)] == [
        ["memory1_kl", "memory1_usage", "memory3_kl", "memory3_usage"]
    ]
    options = model_options(tmp_path)
    assert (options["memory_optimizer"], options["decoder_learned_pos"]) == ("adam", False)
    values = parameters(tmp_path)["decoder.layers.2.memory_sublayer.memory.values"]
    assert values.shape == (64, 8)
    assert tokens_evaluated(evaluate_lm(data, tmp_path / "checkpoint_last.pt")) == test_tokens


SEGMENT_MODELS = {
    "transformer_xl": (
        *("--arch", "transformer_xl", *SMALL, "--decoder-ffn-embed-dim", 32),
        *("--memory-layers", "1,2", "--memory-interleave", *MEMORY),
    ),
    "adaptive span": (
        *("--arch", "all_attention_lm", *SMALL, "--persistent-vectors", 4),
        *("--adaptive-span", "--attention-span", 12, "--span-ramp", 4, "--span-init", 0.2),
        *("--criterion", "segment_loss", "--span-loss", 0.001),
        *("--memory-layers", "2", *MEMORY, "--memory-query-batch-norm"),
    ),
}


@pytest.mark.parametrize("name", SEGMENT_MODELS)
def test_segment_models_are_trained_and_scored(data, tmp_path, name, test_tokens):
    model = SEGMENT_MODELS[name]
    printed = train(data, tmp_path, *OPTIMIZER, "--max-update", 6, model=model)
    layers = model[model.index("--memory-layers") + 1]
    assert f"product-key memories in layers {layers}" in printed
    figures = [f"memory{layer}_{kind}" for layer in layers.split(",") for kind in ("kl", "usage")]
    assert [sorted(found) for found in measured(printed)] == [figures]
    assert model_options(tmp_path)["memory_optimizer"] == "adam_with_memory"
    printed = evaluate(data, tmp_path / "checkpoint_last.pt", "--tokens-per-sample", 5)
    assert tokens_evaluated(printed) == test_tokens


@pytest.mark.slow
def test_two_workers_measure_together(data, tmp_path):
    """With padding in the last segment, whose streams differ in length."""
    options = (*OPTIMIZER, "--max-update", 3, "--batch-size-valid")
    model = SEGMENT_MODELS["adaptive span"]
    of_one = measured(train(data, tmp_path / "one", *options, 4, model=model))
    of_two = measured(train_on_two_workers(data, tmp_path / "two", *options, 2, model=model))
    assert of_one[0].keys() == {"memory2_usage", "memory2_kl"}
    assert of_two == [pytest.approx(figures, rel=2e-3) for figures in of_one]


def test_the_slots_that_were_rarely_read_are_trained_alone(data, tmp_path):
    trained, tuned, reads = (tmp_path / name for name in ("trained", "tuned", "reads"))
    train_lm(data, trained, "--memory-layers", "2", updates=3)
    before = trained / "checkpoint_last.pt"
    words = ("--data", data, "--checkpoint", f"model={before}", "--output", reads, "--cpu")
    assert memory_usage.main([*map(str, words), "--rarely-read", "0.25"]) == 0
    rare = np.load(reads / "rarely_read.npz")["memory2"]
    assert rare.sum() == 16
    start = ("--finetune-from-model", before, "--memory-layers", "2")
    train_lm(data, tuned, *start, "--memory-trainable-slots", reads / "rarely_read.npz", updates=6)
    table = next(key for key in parameters(trained) if key.endswith("memory.values"))
    changed = (parameters(trained)[table] != parameters(tuned)[table]).any(1)
    assert changed.any()
    assert not changed[torch.from_numpy(~rare)].any()
    # the file is not needed any longer
    (reads / "rarely_read.npz").unlink()
    evaluate_lm(data, tuned / "checkpoint_last.pt")


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bf16", ()),
        ("model", ("--memory-share-values", "--memory-parallel", "--memory-output-gate")),
    ],
)
def test_tables_are_trained_resumed_averaged_and_scored(
    data, tmp_path, test_tokens, dtype, options
):
    model = ("--memory-layers", "1,3", "--memory-values-dtype", dtype, *options)
    train_lm(data, tmp_path, *model, *NO_VALIDATION, "--save-interval-updates", 3)
    resumed = tmp_path / "resumed"
    start = ("--restore-file", tmp_path / "checkpoint_1_3.pt")
    train_lm(data, resumed, *model, *NO_VALIDATION, *start)
    assert_equal(parameters(resumed), parameters(tmp_path), rtol=0, atol=0)
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    tables = [x for name, x in saved["model"].items() if name.endswith("memory.values")]
    assert len(tables) == len(saved["last_optimizer_state"]["tables"]) == (1 if options else 2)
    if dtype == "bf16":
        for table in saved["last_optimizer_state"]["tables"]:
            assert len(table["rows"]) == len(table["exp_avg"]) <= table["slots"] == 64
        # fairseq saves in single precision what has less
        assert tables[0].dtype == torch.float32
        assert torch.equal(tables[0], tables[0].bfloat16().float())
    mean = tmp_path / "average.pt"
    average.main([*map(str, sorted(tmp_path.glob("checkpoint_1_*.pt"))), "--output", str(mean)])
    for path in (tmp_path / "checkpoint_last.pt", mean):
        assert tokens_evaluated(evaluate_lm(data, path)) == test_tokens


@pytest.mark.slow
def test_two_workers_with_sharded_memories_learn_the_translations_that_one_learns(
    make_pairs, tmp_path
):
    pairs = make_pairs("lower", "upper", change=str.upper)
    words = (
        *(pairs, *USER_DIR, "--arch", "pkm_transformer_tiny", *MEMORY, *OPTIMIZER),
        *("--adam-eps", 1e-3, "--max-tokens", 100, *ALL, "--max-update", 6),
        *("--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64, "--dropout", 0),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--log-format", "simple", "--log-interval", 1, "--no-epoch-checkpoints"),
    )
    alone, sharded = tmp_path / "alone", tmp_path / "sharded"
    printed = [
        run("fairseq-train", *words, "--save-dir", alone, "--update-freq", 2),
        train_together(*words, "--save-dir", sharded, "--memory-shard-values"),
    ]
    losses = [
        [float(loss) for loss in re.findall(r"epoch 001: .* loss=([\d.]+),", log)]
        for log in printed
    ]
    parts = "decoder_memory1", "encoder_memory2"
    assert [sorted(figures) for figures in measured(printed[0])] == [
        [f"{part}_{figure}" for part in parts for figure in ("kl", "usage")]
    ]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], abs=0.0011)
    valid = [re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", log)[-1] for log in printed]
    assert float(valid[1]) == pytest.approx(float(valid[0]), abs=0.0011)
    assert_equal(parameters(sharded), parameters(alone), rtol=1e-3, atol=1e-4)
    translations = []
    for folder in (alone, sharded):
        path = ("--path", folder / "checkpoint_last.pt", "--beam", 2, "--batch-size", 8)
        found = run("fairseq-generate", pairs, *USER_DIR, *path, *ALL)
        translations.append(re.findall(r"^H-(\d+)\t\S+\t(.*)$", found, re.MULTILINE))
    assert len(translations[0]) == 31
    assert translations[1] == translations[0]
