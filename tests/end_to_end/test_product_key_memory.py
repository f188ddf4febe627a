"""Product-key memories through fairseq's commands."""

import math
import re

import pytest
import torch
from fairseq import checkpoint_utils

import fairseq_plugins  # noqa: F401 (registers the models)
from fairseq_plugins.product_key_memory.usage import MemoryUsage, kl_from_uniform, usage
from tests.end_to_end.commands import (
    ALL,
    USER_DIR,
    evaluate,
    log_probabilities,
    loss,
    run,
    tokens_evaluated,
    train,
    train_on_two_workers,
)
from tests.end_to_end.results import parameters
from tests.product_key_memory.tiny import memories

TASK = (*USER_DIR, "--task", "language_modeling")
MEMORY = ("--memory-slots", 64, "--memory-heads", 2, "--memory-knn", 4, "--memory-query-dim", 8)
SMALL = ("--decoder-layers", 3, "--decoder-embed-dim", 16, "--decoder-attention-heads", 2)
OPTIMIZER = ("--optimizer", "adam_with_memory", "--lr", 0.003, "--memory-lr", 0.01)


def train_lm(data, folder, *options, fails=False):
    """Train a language model for a few updates of 8 blocks of 16 tokens."""
    return run(
        "fairseq-train",
        data,
        *TASK,
        *("--tokens-per-sample", 16, "--batch-size", 8, *ALL, "--max-update", 6),
        *("--save-dir", folder, "--log-format", "simple", "--no-epoch-checkpoints"),
        *(() if "--optimizer" in options else OPTIMIZER),
        *options,
        fails=fails,
    )


def evaluate_lm(data, folder, *options):
    """Run fairseq-eval-lm on the test split and return what it printed."""
    path = ("--path", folder / "checkpoint_last.pt", "--gen-subset", "test")
    return run("fairseq-eval-lm", data, *TASK, *path, *ALL, "--tokens-per-sample", 16, *options)


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
    """Folder of a language model trained by the name of a preset, and its log."""
    folder = tmp_path_factory.mktemp("language model")
    often = ("--validate-interval-updates", 3)
    printed = train_lm(data, folder, "--arch", "pkm_transformer_lm_tiny", *MEMORY, *often)
    return folder, printed


def test_a_language_model_is_trained_and_scored(data, language_model, test_tokens):
    folder, _ = language_model
    printed = evaluate_lm(data, folder)
    assert tokens_evaluated(printed) == test_tokens
    assert loss(printed) < math.log2(24)


def test_blocks_longer_than_the_models_are_refused(data, language_model):
    """fairseq would leave them out, and report a perplexity of 1."""
    path = ("--path", language_model[0] / "checkpoint_last.pt", "--gen-subset", "test")
    printed = run("fairseq-eval-lm", data, *TASK, *path, *ALL, fails=True)
    assert "--tokens-per-sample is 1024: the model has positions for blocks" in printed


def test_training_knows_its_optimizer_and_evaluation_loads_it(language_model):
    folder, printed = language_model
    assert model_options(folder)["memory_optimizer"] == "adam_with_memory"
    everything, trained = (
        int(count.replace(",", ""))
        for count in re.search(r"params: ([\d,]+) \(num. trained: ([\d,]+)\)", printed).groups()
    )
    # the values, which the optimizer gets by another way
    assert everything - trained == 64 * 128
    values = parameters(folder)["decoder.layers.2.fc1.memory.values"]
    assert values.shape == (64, 128)


def test_a_language_model_generates(data, language_model):
    path = ("--path", language_model[0] / "checkpoint_last.pt", "--gen-subset", "test", *ALL)
    given = ("--tokens-per-sample", 16, "--batch-size", 8, "--prefix-size", 3, "--beam", 3)
    printed = run("fairseq-generate", data, *TASK, *path, *given, "--max-len-b", 14)
    assert len(re.findall(r"^H-\d+\t", printed, re.MULTILINE)) == 10


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
        *(*placed, *MEMORY, "--optimizer", "adam", "--lr", 0.003),
        *("--no-decoder-learned-pos", "--checkpoint-activations"),
    )
    assert [sorted(figures) for figures in measured(printed)] == [
        ["memory1_kl", "memory1_usage", "memory3_kl", "memory3_usage"]
    ]
    options = model_options(tmp_path)
    assert (options["memory_optimizer"], options["decoder_learned_pos"]) == ("adam", False)
    values = parameters(tmp_path)["decoder.layers.2.memory_sublayer.memory.values"]
    assert values.shape == (64, 8)
    assert tokens_evaluated(evaluate_lm(data, tmp_path)) == test_tokens


def test_a_preset_without_its_memory(data, tmp_path):
    """The baseline; --decoder-learned-pos, which is on anyway, leaves positions learned."""
    without = ("--memory-layers", "", "--decoder-learned-pos")
    printed = train_lm(data, tmp_path, "--arch", "pkm_transformer_lm_tiny", *without)
    assert measured(printed) == [{}]
    saved = parameters(tmp_path)
    assert "decoder.embed_positions.weight" in saved
    assert not any("memory" in name for name in saved)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precisions_train(data, tmp_path, precision):
    options = ("--arch", "pkm_transformer_lm_tiny", *MEMORY, f"--{precision}")
    if precision == "fp16":
        options += ("--fp16-no-flatten-grads", "--fp16-init-scale", 4)
    printed = train_lm(data, tmp_path, *options, "--max-update", 3)
    assert measured(printed)[0]["memory3_usage"] > 0
    assert all(weight.isfinite().all() for weight in parameters(tmp_path).values())


def test_streams_of_segments_are_refused(data, tmp_path):
    task = ("--arch", "pkm_transformer_lm_tiny", "--task", "segment_language_modeling")
    printed = train_lm(data, tmp_path, *task, fails=True)
    assert "--arch pkm_transformer_lm reads blocks of text that have no past" in printed
    assert "give --task language_modeling, or --arch transformer_xl" in printed


# --- translation


@pytest.fixture(scope="module")
def pairs(make_pairs):
    """Folder of a binarized translation task: the same words in capitals, last to first."""
    return make_pairs("lower", "upper", change=str.upper)


@pytest.fixture(scope="module")
def translation_model(pairs, tmp_path_factory):
    """Folder of a translation model after two epochs, and its log."""
    folder = tmp_path_factory.mktemp("translation model")
    printed = run(
        "fairseq-train",
        pairs,
        *USER_DIR,
        *("--arch", "pkm_transformer_tiny", *MEMORY, *OPTIMIZER, "--max-tokens", 200, *ALL),
        *("--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64, "--max-epoch", 2),
        *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
        *("--save-dir", folder, "--log-format", "simple", "--no-epoch-checkpoints"),
    )
    return folder, printed


def test_a_translation_model_is_trained_with_fairseqs_options(translation_model):
    folder, printed = translation_model
    names = [f"{part}_{figure}" for part in ("encoder_memory2", "decoder_memory1")
             for figure in ("kl", "usage")]  # fmt: skip
    assert [sorted(figures) for figures in measured(printed)] == [sorted(names)] * 2
    saved = parameters(folder)
    for layer in ("encoder.layers.1", "decoder.layers.0"):
        assert saved[f"{layer}.fc1.memory.values"].shape == (64, 32)
        assert f"{layer}.fc2.weight" not in saved
    assert saved["encoder.layers.0.fc1.weight"].shape == (64, 32)


def test_a_translation_model_translates(pairs, translation_model):
    path = ("--path", translation_model[0] / "checkpoint_last.pt", "--beam", 4)
    printed = run("fairseq-generate", pairs, *USER_DIR, *path, *ALL, "--batch-size", 8)
    assert len(re.findall(r"^H-\d+\t", printed, re.MULTILINE)) == 31
    assert "Generate test with beam=4: BLEU4 = " in printed
    printed = run("fairseq-interactive", pairs, *USER_DIR, *path, text="the cat\nhome\n")
    assert len(re.findall(r"^H-\d+\t-[\d.]+\t[A-Z ]*$", printed, re.MULTILINE)) == 2


# --- segments

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
    printed = train(data, tmp_path, *OPTIMIZER, "--max-update", 12, model=model)
    layers = model[model.index("--memory-layers") + 1]
    assert f"product-key memories in layers {layers}" in printed
    figures = [f"memory{layer}_{kind}" for layer in layers.split(",") for kind in ("kl", "usage")]
    assert [sorted(found) for found in measured(printed)] == [figures]
    assert model_options(tmp_path)["memory_optimizer"] == "adam_with_memory"
    found = []
    for length in (5, 1000):
        # the memory of the segments before covers all of the text
        options = ("--tokens-per-sample", length, "--output-word-probs")
        if name == "transformer_xl":
            options += ("--model-overrides", "{'mem_len': 1000}")
        printed = evaluate(data, tmp_path / "checkpoint_last.pt", *options)
        assert tokens_evaluated(printed) == test_tokens
        found.append(log_probabilities(printed))
    assert found[0] == pytest.approx(found[1], abs=3e-4)


def test_two_workers_measure_together(data, tmp_path):
    """With padding in the last segment, whose streams differ in length."""
    options = (*OPTIMIZER, "--max-update", 3, "--batch-size-valid")
    model = SEGMENT_MODELS["adaptive span"]
    of_one = measured(train(data, tmp_path / "one", *options, 4, model=model))
    of_two = measured(train_on_two_workers(data, tmp_path / "two", *options, 2, model=model))
    assert of_one[0].keys() == {"memory2_usage", "memory2_kl"}
    assert of_two == [pytest.approx(figures, rel=2e-3) for figures in of_one]
