import json

import pytest
import torch
from matplotlib.figure import Figure

from scripts._shared.command_line import NamedFile
from scripts.plot import attention_spans as plot_attention_spans
from tests.scripts.evaluate import saved_models
from tests.scripts.tables import cells

SPANS = [[0.0, 0.25], [0.5, 1.0], [0.126, 0.0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints all.pt and half.pt with spans, fixed.pt and other.pt without."""
    folder = tmp_path_factory.mktemp("spans")
    adaptive = {"adaptive_span": True, "attention_span": 64, "span_ramp": 8}
    for name, options in {
        "all": adaptive,
        "half": {**adaptive, "persistent_variant": "head-split"},
        "fixed": {},
    }.items():
        path = folder / f"{name}.pt"
        saved_models.write_checkpoint(path, "all_attention_lm", **options)
        state = torch.load(path, weights_only=True)
        state["optimizer_history"][-1]["num_updates"] = 1200
        for layer, values in enumerate(SPANS):
            key = f"decoder.layers.{layer}.self_attn.span.value"
            if key in state["model"]:
                state["model"][key] = torch.tensor(values[: len(state["model"][key])])
        torch.save(state, path)
    saved_models.write_checkpoint(folder / "other.pt", "transformer_xl")
    return folder


def test_spans_are_those_that_the_mask_lets_through_and_the_log_has(tmp_path):
    options = {"adaptive_span": True, "attention_span": 64, "span_ramp": 8, "decoder_layers": 1}
    path = tmp_path / "model.pt"
    saved_models.write_checkpoint(path, "all_attention_lm", **options)
    for values in ([0.0, 0.3], [0.499, 0.5], [0.51, 1.0]):
        state = torch.load(path, weights_only=True)
        state["model"]["decoder.layers.0.self_attn.span.value"] = torch.tensor(values)
        torch.save(state, path)
        found = plot_attention_spans.read_spans(NamedFile("a", path))
        # m(x) = clamp((R + z - x) / R, 0, 1), x from 0 for the nearest
        z = 64 * torch.tensor(values)
        mask = ((8 + z[:, None] - torch.arange(64)) / 8).clamp(0, 1)
        assert found["layers"][0]["spans"] == (mask > 0).sum(1).tolist()
        # as span_mean and span_max of the log
        tokens = (z + 8).clamp(max=64)
        assert found["mean"] == found["layers"][0]["mean"] == pytest.approx(tokens.mean().item())
        assert found["largest"] == pytest.approx(tokens.max().item())


def test_table_json_and_plot(folder, tmp_path, capsys):
    output = tmp_path / "a" / "spans"
    checkpoints = [f"all={folder}/all.pt", f"half={folder}/half.pt"]
    assert plot_attention_spans.main(["--checkpoint", *checkpoints, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert cells(printed)[2:] == [
        ["all", "1", "16.0", "24.0", "8 24"],
        ["all", "2", "52.0", "64.0", "40 64"],
        ["all", "3", "12.0", "16.1", "17 8"],
        ["half", "1", "8.0", "8.0", "8"],
        ["half", "2", "40.0", "40.0", "40"],
        ["half", "3", "16.1", "16.1", "17"],
    ]
    assert "all, 1,200 updates: mean span 26.7 tokens, largest 64.0 of 64" in printed
    models = json.loads((output / "attention_spans.json").read_text(encoding="utf-8"))["models"]
    assert models[0]["checkpoint"] == f"{folder}/all.pt"
    assert (models[0]["updates"], models[0]["attention_span"]) == (1200, 64)
    assert [layer["spans"] for layer in models[0]["layers"]] == [[8, 24], [40, 64], [17, 8]]
    assert [layer["spans"] for layer in models[1]["layers"]] == [[8], [40], [17]]
    assert len(models) == 2
    assert (output / "attention_spans.png").stat().st_size > 5000


def test_what_is_drawn():
    axes = Figure().add_subplot()
    layers = [
        {"layer": 1, "mean": 32.5, "largest": 33, "spans": [32, 33]},
        {"layer": 2, "mean": 4112, "largest": 8192, "spans": [32, 8192]},
    ]
    plot_attention_spans.draw(axes, [{"model": "all", "layers": layers}])
    drawn = [(round(place), span) for place, span in axes.collections[0].get_offsets()]
    assert drawn == [(1, 32), (1, 33), (2, 32), (2, 8192)]
    assert [list(line.get_ydata()) for line in axes.get_lines()] == [[32.5, 4112], [33, 8192]]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fixed", ": its model all_attention_lm has no adaptive spans; "),
        ("other", ": its model transformer_xl has no adaptive spans; "),
        ("missing", " is no file: "),
    ],
)
def test_checkpoints_without_spans_are_refused(folder, refused, name, message):
    path = folder / f"{name}.pt"
    # nothing is written for the others either
    words = ["--checkpoint", f"all={folder}/all.pt", path]
    refused(plot_attention_spans.main, words, f"--checkpoint {path}{message}")
