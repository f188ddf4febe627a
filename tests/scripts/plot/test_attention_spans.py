import json

import pytest
import torch
from matplotlib.figure import Figure

from scripts.plot import attention_spans as plot_attention_spans
from scripts.plot.attention_spans import spans_in_tokens
from tests.scripts.evaluate import saved_models
from tests.tiny import tiny_model, tokens

SPANS = [[0.0, 0.25], [0.5, 1.0], [0.126, 0.0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints all.pt and half.pt with spans, and fixed.pt without."""
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
    return folder


def test_a_span_counts_the_tokens_that_the_mask_lets_through():
    values = torch.tensor([0.0, 0.3, 0.499, 0.5, 0.51, 0.9, 1.0])
    # m(x) = clamp((R + z - x) / R, 0, 1), x from 0 for the nearest
    mask = ((8 + 64 * values[:, None] - torch.arange(64)) / 8).clamp(0, 1)
    assert spans_in_tokens(values, 64, 8) == (mask > 0).sum(1).tolist()
    assert spans_in_tokens(values, 64, 8) == [8, 28, 40, 40, 41, 64, 64]


def test_a_head_reads_nothing_beyond_its_span():
    model = tiny_model(
        **{"adaptive_span": True, "attention_span": 20, "span_ramp": 4, "persistent_vectors": 0},
        decoder_layers=1,
    ).eval()
    values = torch.tensor([0.0, 0.31])
    model.decoder.layers[0].self_attn.span.value.data = values
    assert spans_in_tokens(values, 20, 4) == [4, 11]
    inputs = tokens(1, 21)
    other = 4 + (inputs - 3) % 16
    last = model(inputs)[0][0, -1]

    def changes_with(distance):
        changed = inputs.clone()
        changed[0, -1 - distance] = other[0, -1 - distance]
        return not torch.equal(model(changed)[0][0, -1], last)

    assert [changes_with(distance) for distance in (1, 11, 12, 20)] == [True, True, False, False]


def test_table_json_and_plot(folder, tmp_path, capsys):
    output = tmp_path / "a" / "spans"
    checkpoints = [f"all={folder}/all.pt", f"half={folder}/half.pt"]
    assert plot_attention_spans.main(["--checkpoint", *checkpoints, "--output", str(output)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "| model   |   layer |   mean span |   largest |   spans of the heads, tokens with ramp |",
        "|:--------|--------:|------------:|----------:|---------------------------------------:|",
        "| all     |       1 |        16.0 |        24 |                                   8 24 |",
        "| all     |       2 |        52.0 |        64 |                                  40 64 |",
        "| all     |       3 |        12.5 |        17 |                                   17 8 |",
        "| half    |       1 |         8.0 |         8 |                                      8 |",
        "| half    |       2 |        40.0 |        40 |                                     40 |",
        "| half    |       3 |        17.0 |        17 |                                     17 |",
        "",
        "all, 1,200 updates: mean span 26.8 tokens, largest 64 of 64; ramp 8 included",
        "half, 1,200 updates: mean span 21.7 tokens, largest 40 of 64; ramp 8 included",
        f"written to {output}/attention_spans.json and .png",
    ]
    models = json.loads((output / "attention_spans.json").read_text(encoding="utf-8"))["models"]
    assert models[0] == {
        "model": "all",
        "checkpoint": f"{folder}/all.pt",
        "updates": 1200,
        "attention_span": 64,
        "span_ramp": 8,
        "mean": pytest.approx((8 + 24 + 40 + 64 + 17 + 8) / 6),
        "largest": 64,
        "layers": [
            {"layer": 1, "mean": 16.0, "largest": 24, "spans": [8, 24]},
            {"layer": 2, "mean": 52.0, "largest": 64, "spans": [40, 64]},
            {"layer": 3, "mean": 12.5, "largest": 17, "spans": [17, 8]},
        ],
    }
    assert [layer["spans"] for layer in models[1]["layers"]] == [[8], [40], [17]]
    assert len(models) == 2
    assert (output / "attention_spans.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("spans", "scale"), [([[32, 32], [40, 64]], "linear"), ([[32, 33], [32, 8192]], "log")]
)
def test_the_scale_suits_the_spans(spans, scale):
    axes = Figure().add_subplot()
    layers = [
        {"layer": number, "mean": sum(heads) / 2, "largest": max(heads), "spans": heads}
        for number, heads in enumerate(spans, start=1)
    ]
    plot_attention_spans.draw(axes, [{"model": "all", "layers": layers}])
    assert axes.get_yscale() == scale
    drawn = [tuple(point) for point in axes.collections[0].get_offsets()]
    assert [span for _, span in drawn] == [span for heads in spans for span in heads]
    assert [round(place) for place, _ in drawn] == [1, 1, 2, 2]
    mean, largest = (list(line.get_ydata()) for line in axes.get_lines())
    assert mean == [sum(heads) / 2 for heads in spans]
    assert largest == [max(heads) for heads in spans]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fixed",
            ": its model all_attention_lm has no adaptive spans; name a checkpoint of a model that "
            "was trained with --adaptive-span",
        ),
        ("missing", " is no file: name one that fairseq-train wrote"),
    ],
)
def test_checkpoints_without_spans_are_refused(folder, refused, name, message):
    path = folder / f"{name}.pt"
    # nothing is written for the others either
    words = ["--checkpoint", f"all={folder}/all.pt", path]
    refused(plot_attention_spans.main, words, f"--checkpoint {path}{message}\n")
