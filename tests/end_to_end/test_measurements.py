"""The measuring scripts agree with fairseq-eval-lm on models that fairseq-train trained."""

import json
import math
import re

from fairseq_plugins import load
from scripts.evaluate import attention_length as plot_attention_length
from scripts.evaluate import recl as measure_recl
from tests.end_to_end.commands import evaluate, loss


def test_losses_are_those_of_fairseq_eval_lm(data, transformer_xl, test_tokens, tmp_path):
    overrides = {"mem_len": 6, "same_length": True, "clamp_len": 4}
    printed = evaluate(
        data,
        transformer_xl,
        *("--tokens-per-sample", 8, "--batch-size", 3),
        *("--model-overrides", repr(overrides)),
    )
    perplexity = re.search(r"Perplexity: ([\d.]+)", printed)[1]

    model = load(transformer_xl, data, **overrides)
    losses = model.score_split("test", batch_size=3, tokens_per_sample=8)
    assert len(losses) == test_tokens
    assert f"{losses.mean(dtype='float64') / math.log(2):.4f}" == f"{loss(printed):.4f}"

    words = ["--data", data, "--checkpoint", transformer_xl, "--mem-len", "3,6", "--clamp-len", 4]
    words += ["--tokens-per-sample", 8, "--batch-size", 3, "--cpu", "--output", tmp_path]
    assert plot_attention_length.main([*map(str, words)]) == 0
    row = json.loads((tmp_path / "attention_length.json").read_text())["rows"][1]
    assert (row["mem_len"], row["tokens"], row["unit"]) == (6, test_tokens, "perplexity")
    assert f"{row['nats'] / math.log(2):.4f}" == f"{loss(printed):.4f}"
    assert f"{row['loss']:.2f}" == perplexity


def test_recl_of_two_trained_models(data, checkpoint, transformer_xl, tmp_path, capsys):
    words = ["--data", data, "--checkpoint", f"XL={transformer_xl}", f"AA={checkpoint}", "--cpu"]
    words += ["--step", 4, "--max-context", 12, "--stride", 4, "--output", tmp_path]
    assert measure_recl.main([*map(str, words)]) == 0
    found = json.loads((tmp_path / "recl.json").read_text())["models"]
    assert set(found) == {"XL", "AA"}
    assert all(model["recl"]["0.1"]["tokens"] in (4, 8, 12) for model in found.values())
    assert (tmp_path / "recl.png").stat().st_size > 5000
    assert "| XL " in capsys.readouterr().out
