import json

import pytest
import torch
from fairseq.logging import metrics
from matplotlib.figure import Figure

from scripts.plot import branch_weights as plot_branch_weights
from scripts.plot.branch_weights import draw
from tests.weighted_transformer.tiny import sentences, tiny_as_written

KAPPA, ALPHA = [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]
LAYERS = ["encoder1", "encoder2", "decoder1", "decoder2"]


def json_line(updates, **changed):
    """Return a validation line in JSON with κ and α of all layers; ``changed`` sets some α."""
    weights = {
        f"valid_{layer}_{kind}{number}": f"{value:g}"
        for layer in LAYERS
        for kind, values in (("kappa", KAPPA), ("alpha", changed.get(layer, ALPHA)))
        for number, value in enumerate(values, start=1)
    }
    fields = {"epoch": 1, "valid_loss": "3.06", **weights, "valid_num_updates": f"{updates}"}
    return json.dumps({**fields, "valid_best_loss": "3"})


def simple_line(updates, model):
    """Return the validation line of a model in fairseq's simple format."""
    with metrics.aggregate(new_root=True) as found:
        model(**sentences())
    values = {"loss": "3.06", **found.get_smoothed_values(), "num_updates": updates}
    fields = " | ".join(f"{name} {value}" for name, value in values.items())
    return f"2026-01-31 19:41:58 | INFO | valid | epoch 001 | valid on 'valid' subset | {fields}"


LOG = "\n".join(
    [
        '{"epoch": 1, "update": 0.27, "loss": "2.985", "num_updates": "10", "lr": "0.07"}',
        json_line(10, encoder2=[0.25, 0.25, 0.25, 0.25]),
        json_line(20, encoder2=[0.9, 0.1, 0, 0]),
        # a resumed training is at update 20 again
        json_line(20, encoder2=[0.4, 0.3, 0.2, 0.1]),
        json_line(30, encoder2=[0.7, 0.2, 0.1, 0]),
        json_line(40)[:-20],
    ]
)


def write_checkpoint(path, updates, **options):
    """Write the parts of a checkpoint that the script reads; return the model."""
    model = tiny_as_written(seed=updates, **options)
    content = {"model": model.state_dict(), "optimizer_history": [{"num_updates": updates}]}
    torch.save(content, path)
    return model


def plot(output, *words):
    assert plot_branch_weights.main([*map(str, words), "--output", str(output)]) == 0
    assert (output / "branch_weights.png").stat().st_size > 5000
    return json.loads((output / "branch_weights.json").read_text(encoding="utf-8"))


def test_weights_of_a_log(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(LOG, encoding="utf-8")
    words = ("--log", log, "--layer", "encoder2", "decoder1", "--smooth", "3")
    alpha = [[0.25] * 4, [0.4, 0.3, 0.2, 0.1], [0.7, 0.2, 0.1, 0]]
    assert plot(tmp_path / "a" / "weights", *words) == {
        "source": f"--log {log}",
        "updates": [10, 20, 30],
        "layers": {
            # the later of the two lines about update 20, without smoothing
            "encoder2": {"kappa": [KAPPA] * 3, "alpha": alpha},
            "decoder1": {"kappa": [KAPPA] * 3, "alpha": [ALPHA] * 3},
        },
    }


@pytest.mark.parametrize("options", [{}, {"branch_parameterization": "softmax"}])
def test_checkpoints_of_a_folder(tmp_path, options):
    options = {"branch_decoder_attention": "self", **options}
    models = [
        write_checkpoint(tmp_path / f"checkpoint_1_{updates}.pt", updates, **options)
        for updates in (200, 1000)
    ]
    write_checkpoint(tmp_path / "checkpoint_last.pt", 1000, **options)
    (tmp_path / "notes.txt").touch()
    found = plot(tmp_path / "weights", "--checkpoint", tmp_path)
    assert found["updates"] == [200, 1000]
    assert list(found["layers"]) == LAYERS
    for at, model in enumerate(models):
        weights = model.decoder.layers[1].self_attn.feed_forward.weights
        for kind, expected in zip(("kappa", "alpha"), weights.learned(), strict=True):
            assert found["layers"]["decoder2"][kind][at] == expected.tolist()


def test_both_attentions_of_a_decoder_layer_are_told_apart(tmp_path):
    options = {"branch_decoder_attention": "both", "branch_residual": "sublayers"}
    path, log = tmp_path / "model.pt", tmp_path / "log.txt"
    model = write_checkpoint(path, 7, **options).eval()
    log.write_text(simple_line(7, model), encoding="utf-8")
    found = plot(tmp_path / "checkpoint", "--checkpoint", path)["layers"]
    logged = plot(tmp_path / "log", "--log", log)["layers"]
    layers = ["encoder1", "encoder2", "decoder1", "decoder1_self", "decoder2", "decoder2_self"]
    assert list(found) == list(logged) == layers
    layer = model.decoder.layers[1]
    for name, attention in (("decoder2", layer.encoder_attn), ("decoder2_self", layer.self_attn)):
        weights = attention.out_proj.weights
        assert found[name]["kappa"] == [weights.kappa.tolist()]
        # two sublayers share one α, in the network after both
        assert ("alpha" in found[name]) == (name == "decoder2")
    for name, weights in logged.items():
        assert weights.keys() == found[name].keys()
        for kind, (rounded,) in weights.items():
            assert rounded == pytest.approx(found[name][kind][0], abs=1e-4), (name, kind)


def test_each_layer_has_two_panels_and_each_branch_a_line():
    # sorted as text, branches 10 to 12 would come before 2
    twelve = [[number / 78 for number in range(1, 13)]] * 4
    series = {
        ("encoder1", "kappa"): [KAPPA] * 4,
        ("encoder1", "alpha"): [[x, 7 - x, 0, 0] for x in (1.0, 2.0, 6.0, 3.0)],
        ("decoder1", "kappa"): twelve,
    }
    figure = Figure()
    draw(figure.add_subplot(), [10, 20, 60, 90], series, 3)
    assert [axes.get_title() for axes in figure.axes] == ["encoder1 κ", "encoder1 α", "decoder1 κ"]
    # the branches, and 1/M
    assert [len(axes.get_lines()) for axes in figure.axes] == [5, 5, 13]
    line = figure.axes[1].get_lines()[0]
    assert list(line.get_xdata()) == [10, 20, 60, 90]
    # the mean of three neighbours, fewer at the ends
    assert list(line.get_ydata()) == pytest.approx([1.5, 3.0, 11 / 3, 4.5])
    lines = figure.axes[2].get_lines()
    assert [line.get_ydata()[0] for line in lines[:-1]] == pytest.approx(twelve[0])
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 13
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == [*(f"branch {number}" for number in range(1, 13)), "1/M"]


NO_WEIGHTS = '{"epoch": 1, "valid_loss": "3.06", "valid_num_updates": "10"}'
NOT_FINITE = json_line(2000, decoder2=[0.5, float("nan"), 0.25, 0.25])
FEWER = f"{json_line(10)}\n{json_line(2000, encoder1=[0.5, 0.5])}"


@pytest.mark.parametrize(
    ("words", "content", "message"),
    [
        ("--log {}/train.log --layer encoder3", LOG, "--layer is 'encoder3': there are encoder1"),
        ("--log {}/train.log --smooth 0", LOG, "--smooth is 0: "),
        ("--log {}/none", "", "--log {}/none is not a file: "),
        ("--log {}/train.log", NO_WEIGHTS, "--log {}/train.log has no kappa and alpha: "),
        ("--log {}/train.log", FEWER, "--log {}/train.log: after 2,000 updates there are other"),
        ("--log {}/train.log", NOT_FINITE, "--log {}/train.log: after 2,000 updates a weight of "),
        ("--checkpoint {}", "", "--checkpoint {} has no checkpoint.*.pt: "),
        ("--checkpoint {}/other.pt", "", "--checkpoint {}/other.pt has no kappa and alpha: "),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, refused, words, content, message):
    (tmp_path / "train.log").write_text(content, encoding="utf-8")
    torch.save({"cfg": {"model": {}}, "model": {"x": torch.ones(2)}}, tmp_path / "other.pt")
    words = words.replace("{}", str(tmp_path)).split()
    refused(plot_branch_weights.main, words, message.replace("{}", str(tmp_path)))
