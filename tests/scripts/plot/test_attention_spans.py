import json

import pytest
import torch
from matplotlib.figure import Figure

from scripts.plot import attention_spans as plot_attention_spans
from tests.scripts.evaluate import saved_models

SPANS = [[0.0, 0.3], [0.499, 0.5], [0.51, 1.0]]


def write_checkpoint(path, spans, **options):
    """Write a model with these spans, as fractions of 64 tokens, and a ramp of 8."""
    options = {"adaptive_span": True, "attention_span": 64, "span_ramp": 8, **options}
    saved_models.write_checkpoint(path, "all_attention_lm", **options)
    state = torch.load(path, weights_only=True)
    state["optimizer_history"][-1]["num_updates"] = 1200
    for layer, values in enumerate(spans):
        state["model"][f"decoder.network.layers.{layer}.self_attn.span.value"] = torch.tensor(values)
    torch.save(state, path)


def test_spans_are_those_that_the_mask_lets_through_and_the_log_has(tmp_path, capsys):
    path, output = tmp_path / "model.pt", tmp_path / "a" / "spans"
    write_checkpoint(path, SPANS)
    words = ["--checkpoint", f"all={path}", "--output", str(output)]
    assert plot_attention_spans.main(words) == 0
    (model,) = json.loads((output / "attention_spans.json").read_text(encoding="utf-8"))["models"]
    assert (model["checkpoint"], model["updates"], model["attention_span"]) == (str(path), 1200, 64)
    # m(x) = clamp((R + z - x) / R, 0, 1), x = 0 for the nearest token
    z = 64 * torch.tensor(SPANS)
    mask = ((8 + z[..., None] - torch.arange(64)) / 8).clamp(0, 1)
    assert [layer["spans"] for layer in model["layers"]] == (mask > 0).sum(-1).tolist()
    # like span_mean and span_max in the log
    tokens = (z + 8).clamp(max=64)
    for name, expected in (("mean", tokens.mean(1)), ("largest", tokens.amax(1))):
        assert [layer[name] for layer in model["layers"]] == pytest.approx(expected.tolist())
    assert model["mean"] == pytest.approx(tokens.mean().item())
    line = f"all, 1,200 updates: mean span {tokens.mean():.1f} tokens, largest 64.0 of 64"
    assert line in capsys.readouterr().out
    assert (output / "attention_spans.png").stat().st_size > 5000


def test_what_is_drawn():
    axes = Figure().add_subplot()
    layers = [
        {"layer": 1, "mean": 32.5, "largest": 33, "spans": [32, 33]},
        {"layer": 2, "mean": 4112, "largest": 8192, "spans": [32, 8192]},
    ]
    plot_attention_spans.draw(axes, [{"model": "all", "layers": layers}])
    drawn = [(round(x), span) for x, span in axes.collections[0].get_offsets()]
    assert drawn == [(1, 32), (1, 33), (2, 32), (2, 8192)]
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[32.5, 4112], [33, 8192]]


def test_checkpoints_without_spans_are_refused(tmp_path, refused):
    write_checkpoint(tmp_path / "all.pt", SPANS)
    fixed = tmp_path / "fixed.pt"
    # nothing is written for the valid checkpoint, either
    words = ["--checkpoint", f"all={tmp_path}/all.pt", fixed]
    refused(plot_attention_spans.main, words, f"--checkpoint {fixed} is not a file: ")
    saved_models.write_checkpoint(fixed, "all_attention_lm")
    message = f"--checkpoint {fixed}: its model all_attention_lm has no adaptive spans; "
    refused(plot_attention_spans.main, words, message)
