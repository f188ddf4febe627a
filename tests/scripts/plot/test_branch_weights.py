import json

import pytest
import torch
from fairseq.logging import metrics
from matplotlib.figure import Figure

from scripts.plot import branch_weights as plot_branch_weights
from scripts.plot.branch_weights import draw, read_validations
from tests.scripts.tables import cells
from tests.weighted_transformer.tiny import sentences, tiny_as_written

KAPPA, ALPHA = [0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]
LAYERS = ["encoder1", "encoder2", "decoder1", "decoder2"]


def figures(prefix="", **changed):
    """What a validation tells of all layers, by name."""
    return {
        f"{prefix}{layer}_{kind}{number}": f"{value:g}"
        for layer in LAYERS
        for kind, values in (("kappa", KAPPA), ("alpha", changed.get(layer, ALPHA)))
        for number, value in enumerate(values, start=1)
    }


def model_figures(model):
    """What a validation of a model tells."""
    with metrics.aggregate(new_root=True) as found:
        model(**sentences())
    return found.get_smoothed_values()


def json_line(updates, **changed):
    told = {"epoch": 1, "valid_loss": "3.06", "valid_ppl": "8.3", **figures("valid_", **changed)}
    return json.dumps({**told, "valid_num_updates": f"{updates}", "valid_best_loss": "3"})


def simple_line(updates, subset="valid", model=None, **changed):
    told = {"loss": "3.06", **(model_figures(model) if model else figures(**changed))}
    told["num_updates"] = updates
    fields = " | ".join(f"{name} {value}" for name, value in told.items())
    return (
        f"2026-01-31 19:41:58 | INFO | {subset} | epoch 001 | valid on '{subset}' subset | {fields}"
    )


JSON_LOG = "\n".join(
    [
        "{'_name': None, 'common': {'_name': None, 'log_interval': 5, 'log_format': 'json'}}",
        '{"epoch": 1, "update": 0.27, "loss": "2.985", "num_updates": "10", "lr": "0.07"}',
        'begin validation on "valid" subset',
        json_line(10, encoder2=[0.25, 0.25, 0.25, 0.25]),
        json_line(20, encoder2=[0.9, 0.1, 0, 0]),
        # a resumed training is at 20 again
        json_line(20, encoder2=[0.4, 0.3, 0.2, 0.1]),
        json_line(30, encoder2=[0.7, 0.2, 0.1, 0]),
        '{"epoch": 1, "train_loss": "3.224", "train_num_updates": "30", "train_lr": "0.07"}',
        json_line(40)[:-20],
    ]
)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(JSON_LOG, encoding="utf-8")
    return path


def write_checkpoint(path, updates, **options):
    """Write what is read of fairseq-train's checkpoints; return the model."""
    model = tiny_as_written(seed=updates, **options)
    content = {"model": model.state_dict(), "optimizer_history": [{"num_updates": updates}]}
    torch.save(content, path)
    return model


def learned(model, layer):
    """κ and α of a layer of a model, such as encoder2."""
    attention = getattr(model, layer[:-1]).layers[int(layer[-1]) - 1]
    weights = attention.self_attn if layer.startswith("encoder") else attention.encoder_attn
    return [x.tolist() for x in weights.feed_forward.weights.learned()]


def read(output):
    return json.loads((output / "branch_weights.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line",
    [
        json_line(1200),
        f"2026-01-31 19:41:58 | INFO | valid | {json_line(1200)}",
        f"{simple_line(1200)} | best_loss 3",
    ],
)
def test_lines_of_both_formats_tell_the_same(tmp_path, line):
    log = tmp_path / "train.log"
    others = [
        simple_line(10, subset="test"),
        simple_line(20).removesuffix("20"),
        json_line(30)[:-1],
        "epoch 001 | valid on 'valid' subset | loss 3.06 | num_updates 40",
    ]
    log.write_text("\n".join([*others, line]), encoding="utf-8")
    of_layer = {"alpha": ALPHA, "kappa": KAPPA}
    weights = {(layer, kind): of_layer[kind] for layer in LAYERS for kind in of_layer}
    assert read_validations(log) == {1200: weights}


def test_table_json_and_plot_of_a_log(log, tmp_path, capsys):
    output = tmp_path / "a" / "weights"
    words = ["--log", str(log), "--layer", "encoder2", "decoder1", "--smooth", "3"]
    assert plot_branch_weights.main([*words, "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    assert cells(printed)[2:] == [
        ["encoder2 κ", "0.1000", "0.2000", "0.3000", "0.4000"],
        ["encoder2 α", "0.7000", "0.2000", "0.1000", "0.0000"],
        ["decoder1 κ", "0.1000", "0.2000", "0.3000", "0.4000"],
        ["decoder1 α", "0.7000", "0.1000", "0.1000", "0.1000"],
    ]
    assert "after 30 updates" in printed
    assert read(output) == {
        "source": f"--log {log}",
        "updates": [10, 20, 30],
        "layers": {
            "encoder2": {
                "kappa": [KAPPA] * 3,
                # the later of two lines about update 20, and not smoothed
                "alpha": [[0.25] * 4, [0.4, 0.3, 0.2, 0.1], [0.7, 0.2, 0.1, 0]],
            },
            "decoder1": {"kappa": [KAPPA] * 3, "alpha": [ALPHA] * 3},
        },
    }
    assert (output / "branch_weights.png").stat().st_size > 5000
    names = {path.name for path in output.iterdir()}
    assert names == {"branch_weights.json", "branch_weights.png"}


def test_checkpoints_of_a_folder(tmp_path):
    folder, output = tmp_path / "checkpoints", tmp_path / "weights"
    folder.mkdir()
    options = {"branch_decoder_attention": "self"}
    models = {
        updates: write_checkpoint(folder / f"checkpoint_1_{updates}.pt", updates, **options)
        for updates in (200, 1000)
    }
    write_checkpoint(folder / "checkpoint_last.pt", 1000, **options)
    (folder / "notes.txt").touch()
    assert plot_branch_weights.main(["--checkpoint", str(folder), "--output", str(output)]) == 0
    found = read(output)
    assert found["updates"] == [200, 1000]
    assert list(found["layers"]) == LAYERS
    for at, model in enumerate(models.values()):
        parameters = dict(model.named_parameters())
        for kind in ("kappa", "alpha"):
            name = f"decoder.layers.1.self_attn.feed_forward.weights.{kind}"
            assert found["layers"]["decoder2"][kind][at] == parameters[name].tolist()


def test_logits_become_weights_by_their_names(tmp_path):
    path, output = tmp_path / "softmax.pt", tmp_path / "weights"
    model = write_checkpoint(path, 7, branch_parameterization="softmax")
    words = ["--checkpoint", str(path), "--layer", "encoder2", "--output", str(output)]
    assert plot_branch_weights.main(words) == 0
    kappa, alpha = learned(model, "encoder2")
    assert read(output)["layers"] == {"encoder2": {"kappa": [kappa], "alpha": [alpha]}}
    assert sum(kappa) == pytest.approx(1)


def test_both_attentions_of_a_decoder_layer_are_told_apart(tmp_path):
    options = {"branch_decoder_attention": "both", "branch_residual": "sublayers"}
    path, outputs = tmp_path / "model.pt", [tmp_path / name for name in ("checkpoint", "log")]
    model = write_checkpoint(path, 7, **options).eval()
    (tmp_path / "log.txt").write_text(simple_line(7, model=model), encoding="utf-8")
    for source, output in zip((path, tmp_path / "log.txt"), outputs, strict=True):
        name = "--log" if source.suffix == ".txt" else "--checkpoint"
        assert plot_branch_weights.main([name, str(source), "--output", str(output)]) == 0
    found, logged = (read(output)["layers"] for output in outputs)
    layers = ["encoder1", "encoder2", "decoder1", "decoder1_self", "decoder2", "decoder2_self"]
    assert list(found) == list(logged) == layers
    layer = model.decoder.layers[1]
    for name, attention in (("decoder2", layer.encoder_attn), ("decoder2_self", layer.self_attn)):
        weights = attention.out_proj.weights
        assert found[name]["kappa"] == [weights.kappa.tolist()]
        # α of two sublayers is one, in the network behind both
        assert ("alpha" in found[name]) == (name == "decoder2")
    for name, weights in logged.items():
        assert weights.keys() == found[name].keys()
        for kind, ((value,), (rounded,)) in zip(
            weights, zip(found[name].values(), weights.values(), strict=True), strict=True
        ):
            assert rounded == pytest.approx(value, abs=1e-4), kind


def test_each_layer_has_two_panels_and_each_branch_a_line():
    # twelve branches in the order of their numbers, of which 10 to 12 sort before 2 as text
    twelve = [[number / 78 for number in range(1, 13)]] * 4
    courses = {
        ("encoder1", "kappa"): [KAPPA] * 4,
        ("encoder1", "alpha"): [[x, 7 - x, 0, 0] for x in (1.0, 2.0, 6.0, 3.0)],
        ("decoder1", "kappa"): twelve,
    }
    figure = Figure()
    draw(figure.add_subplot(), [10, 20, 60, 90], courses, 3)
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--layer encoder3", f"--layer is 'encoder3': there are {', '.join(LAYERS)}"),
        ("--smooth 0", "--smooth is 0: "),
    ],
)
def test_impossible_options_are_refused(log, refused, given, message):
    refused(plot_branch_weights.main, ["--log", log, *given.split()], message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, " is no file: "),
        (
            '{"epoch": 1, "valid_loss": "3.06", "valid_num_updates": "10"}\n',
            " has no kappa and alpha: ",
        ),
        (
            f"{json_line(10)}\n{json_line(2000, encoder1=[0.5, 0.5])}\n",
            ": after 2,000 updates there are other layers or branches than after 10: ",
        ),
        (
            f"{json_line(2000, decoder2=[0.5, float('nan'), 0.25, 0.25])}\n",
            ": after 2,000 updates a weight of decoder2 is no number: ",
        ),
    ],
)
def test_logs_without_weights_are_refused(tmp_path, refused, content, message):
    path = tmp_path / "other.log"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    refused(plot_branch_weights.main, ["--log", str(path)], f"--log {path}{message}")


def test_checkpoints_without_weights_are_refused(tmp_path, refused):
    folder, path = tmp_path / "empty", tmp_path / "other.pt"
    folder.mkdir()
    torch.save({"cfg": {"model": {}}, "model": {"x": torch.ones(2)}}, path)
    for given, message in ((folder, "has no checkpoint*.pt: "), (path, "has no kappa and alpha: ")):
        words = ["--checkpoint", given]
        refused(plot_branch_weights.main, words, f"--checkpoint {given} {message}")
