"""Averages of checkpoints: the mean of weights, constraints that it keeps, refused inputs."""

import shutil

import pytest
import torch

from fairseq_plugins import load
from fairseq_plugins.weighted_transformer.branch_weights import draw_from_simplex
from scripts.convert.average import average, main
from tests.scripts.evaluate.saved_models import write_checkpoint, write_text
from tests.scripts.refusals import refused

TABLE = "decoder.embed_tokens.weight"
DIGEST = "dictionary_version.source"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a folder of three checkpoints with different weights, after 10, 20 and 30 updates."""
    folder = tmp_path_factory.mktemp("models")
    write_text(folder)
    for number, name in enumerate(("checkpoint1.pt", "checkpoint_2_20.pt", "checkpoint3.pt")):
        write_checkpoint(folder / name, "all_attention_lm", seed=number, adaptive_span=True)
        state = torch.load(folder / name, weights_only=True)
        state["optimizer_history"][-1]["num_updates"] = 10 * (number + 1)
        state["last_optimizer_state"] = {"step": torch.ones(3)}
        torch.save(state, folder / name)
    shutil.copy(folder / "checkpoint3.pt", folder / "checkpoint_3_30.pt")
    shutil.copy(folder / "checkpoint1.pt", folder / "checkpoint_best.pt")
    return folder


def run(*words):
    return main([*map(str, words)])


def test_the_last_checkpoints_in_a_folder_are_averaged(models, tmp_path):
    folder, output = tmp_path / "models", tmp_path / "mean.pt"
    # updates take precedence over names, because --reset-dataloader restarts the count of epochs
    folder.mkdir()
    shutil.copy(models / "checkpoint3.pt", folder / "checkpoint1.pt")
    shutil.copy(models / "checkpoint_2_20.pt", folder / "checkpoint_1_20.pt")
    shutil.copy(models / "checkpoint1.pt", folder / "checkpoint9.pt")
    for source in (models, folder):
        assert run(source, "--last", 2, "--output", output) == 0
        state = torch.load(output, weights_only=True)
        one, two = (
            torch.load(models / name, weights_only=True)["model"]
            for name in ("checkpoint_2_20.pt", "checkpoint3.pt")
        )
        assert state["model"].keys() == one.keys()
        for name, weight in state["model"].items():
            mean = (one[name] + two[name]) / 2 if weight.is_floating_point() else one[name]
            torch.testing.assert_close(weight, mean, atol=1e-7, rtol=1e-6)
        assert state["last_optimizer_state"] is None
        assert state["optimizer_history"][-1]["num_updates"] == 30
        assert len(load(output, models).score("abc")) == 3
        output.unlink()


def test_the_mean_keeps_constraints_ties_and_types():
    states = []
    for _ in range(7):
        tied = torch.rand(5, 3)
        kappa, span = draw_from_simplex(8), torch.tensor([0.0, 1.0, 1.0 - 2**-24])
        half = torch.rand(4).bfloat16()
        states.append({"a": tied, "b": tied, "kappa": kappa, "span": span, "half": half})
        states[-1] |= {"count": torch.tensor(len(states)), "c": tied.clone()}
    mean = average(states)
    assert mean["kappa"].min() >= 0
    assert mean["kappa"].double().sum().item() == pytest.approx(1, abs=1e-6)
    assert mean["span"].tolist() == [0.0, 1.0, 1.0 - 2**-24]
    assert (mean["half"].dtype, mean["count"].item()) == (torch.bfloat16, 7)
    # tied weights stay tied, and equal weights that are not tied stay separate
    assert mean["a"].data_ptr() == mean["b"].data_ptr() != mean["c"].data_ptr()
    assert average([states[0]] * 3)["a"].equal(states[0]["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, model: model[DIGEST].add_(1), f"BOTH .* {DIGEST}: "),
        (lambda state, _: state["cfg"]["model"].update(_name="x"), "BOTH .* model: .* and x"),
        (lambda _, model: model.update({TABLE: torch.ones(3)}), rf"BOTH .* {TABLE}: .* and \(3,"),
        (lambda state, _: state.pop("model"), "CHECKPOINT OTHER holds no model"),
        (lambda _, model: model[TABLE].mul_(float("nan")), f"{TABLE} is not finite"),
    ],
)
def test_checkpoints_that_do_not_belong_together_are_refused(
    models, tmp_path, check_refusal, change, message
):
    newest, other = models / "checkpoint3.pt", tmp_path / "other.pt"
    state = torch.load(models / "checkpoint1.pt", weights_only=True)
    change(state, state["model"])
    torch.save(state, other)
    message = message.replace("BOTH", f"{newest} and OTHER").replace("OTHER", str(other))
    check_refusal(main, [newest, other], message)


def test_impossible_choices_are_refused_and_a_file_that_is_there_stays(
    models, tmp_path, check_refusal, call
):
    one, other, copy = (models / f"checkpoint{name}.pt" for name in ("1", "3", "_best"))
    for words, message in (
        ((models, "--last", 1), "--last is 1, of 3 checkpoints"),
        ((models, "--last", 4), "--last is 4, of 3 checkpoints"),
        ((models, models, "--last", 2), "--last takes the folder of one training"),
        ((models,), f"CHECKPOINT {models} is not a file"),
        ((one, copy, other), "CHECKPOINT: give two or"),
    ):
        check_refusal(main, words, message)
    output = tmp_path / "mean.pt"
    output.write_text("mine")
    refusal = call(main, models, "--last", 2, "--output", output)
    assert refused(refusal, f"--output {output} already exists")
    assert output.read_text() == "mine"
