"""An original's checkpoint is imported, evaluated, trained further, and continues prompts."""

import math
import random
import re
import shlex

import numpy as np
import pytest
import torch

import fairseq_plugins
from tests.end_to_end.commands import TASK, evaluate, log_probabilities, run, tokens_evaluated
from tests.scripts.convert.foreign_models import CUTOFFS, adaptive_span, transformer_xl


def write_text(foreign, path, lines, seed):
    """Write random lines of symbols; return the original's numbers of them, with each <eos>."""
    generator = random.Random(seed)
    words = [symbol for symbol in foreign.symbols if symbol != "<eos>"]
    text = [generator.choices(words, k=generator.randint(1, 9)) for _ in range(lines)]
    path.write_text("".join(" ".join(line) + "\n" for line in text), encoding="utf-8")
    return [foreign.symbols.index(word) for line in text for word in (*line, "<eos>")]


def run_importer(foreign, folder):
    foreign.write(folder)
    files = ("checkpoint", "model.pt"), ("config", "config.json"), ("vocab", "vocab.txt")
    named = [word for option, name in files for word in (f"--{option}", str(folder / name))]
    words = ("--source", foreign.source, *named, "--output", str(folder / "imported"))
    run("scripts.convert.checkpoint", *words)
    return folder / "imported"


@pytest.mark.parametrize(
    ("foreign", "criterion", "said"),
    [
        (
            transformer_xl(CUTOFFS, 2),
            ("--criterion", "segment_loss", "--ddp-backend", "legacy_ddp"),
            "recurrence 10 tokens, clamp none, same length no, positions transformer-xl",
        ),
        (
            adaptive_span(far=25.0),
            ("--criterion", "segment_loss", "--span-loss", 1e-6),
            "same length no, zero vectors at the start, adaptive attention span up to 12",
        ),
    ],
    ids=["transformer-xl", "all-attention"],
)
def test_an_imported_model_is_used_as_any_other(tmp_path, foreign, criterion, said):
    imported = run_importer(foreign, tmp_path)
    checkpoint, data = imported / "checkpoint.pt", tmp_path / "bin"
    numbers = write_text(foreign, tmp_path / "test.txt", 12, seed=1)
    write_text(foreign, tmp_path / "train.txt", 40, seed=2)
    texts = [f"--{split}pref={tmp_path}/{split}.txt" for split in ("train", "test")]
    dictionary = ("--srcdict", imported / "dict.txt", "--destdir", data)
    run("fairseq-preprocess", "--only-source", *texts, *dictionary)

    printed = evaluate(data, checkpoint, "--tokens-per-sample", 7, "--output-word-probs")
    assert said in printed
    assert tokens_evaluated(printed) == len(numbers)
    eos = foreign.symbols.index("<eos>")
    expected = foreign.log_probabilities([eos, *numbers[:-1]])[range(len(numbers)), numbers]
    np.testing.assert_allclose(log_probabilities(printed), expected.numpy(), atol=2e-4)

    # from Python, by the folder, with the dictionary that is beside it
    text = (tmp_path / "test.txt").read_text(encoding="utf-8")
    score = fairseq_plugins.load(imported, tokens_per_sample=7).score(text)
    np.testing.assert_allclose(score.log_probs, log_probabilities(printed), atol=2e-6)

    # without dropout, so that the first loss is that of the imported model
    options = shlex.split((imported / "options.txt").read_text(encoding="utf-8"))
    dropouts = ("dropout", "attention-dropout", "activation-dropout", "embed-dropout")
    off = [word for name in (*dropouts, "output-dropout") for word in (f"--{name}", 0)]
    printed = run(
        "fairseq-train",
        data,
        *(*TASK, *options, *criterion, "--finetune-from-model", checkpoint, *off),
        *("--batch-size", 4, "--optimizer", "sgd", "--lr", 0.01, "--max-update", 2),
        *("--disable-validation", "--save-dir", tmp_path / "trained", "--cpu"),
        *("--log-format", "simple", "--log-interval", 1, "--no-epoch-checkpoints"),
    )
    losses = [float(loss) for loss in re.findall(r"train_inner.* loss=([\d.]+)", printed)]
    assert len(losses) == 2
    assert abs(losses[0] - -expected.mean().item() / math.log(2)) < 1
    trained, before = (
        torch.load(path, weights_only=True)["model"]
        for path in (tmp_path / "trained" / "checkpoint_last.pt", checkpoint)
    )
    assert trained.keys() == before.keys()
    moved = max((trained[name] - before[name]).abs().max().item() for name in before)
    assert 0 < moved < 0.1

    prompts = "w0 é w7\n<unk> w29\n"
    printed = run(
        "fairseq-interactive",
        data,
        *(*TASK, "--path", checkpoint, "--beam", 2, "--max-len-b", 12, "--cpu"),
        text=prompts,
    )
    found = re.findall(r"^H-\d+\t-[\d.]+\t(.*)$", printed, re.MULTILINE)
    assert len(found) == 2
    for prompt, hypothesis in zip(prompts.splitlines(), found, strict=True):
        assert hypothesis.startswith(prompt)
        assert not {"<s>", "<pad>", "</s>"} & set(hypothesis.split())
