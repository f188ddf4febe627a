import json
import re

import numpy as np
import pytest
import torch

from scripts._shared.command_line import NamedFile
from scripts.evaluate import recl as measure_recl
from scripts.evaluate._effective_context import Contexts, effective_context
from scripts.evaluate.recl import ContextLosses, Windows, context_limit
from tests.scripts.evaluate.saved_models import token_losses, write_checkpoint, write_text

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text(folder):
    return write_text(folder / "bin", 60)


@pytest.fixture(scope="module")
def models(folder, text):
    """A model with a memory and the window of the same length, one that reads 12 tokens at most."""
    return {
        "XL": write_checkpoint(folder / "xl.pt", "transformer_xl", mem_len=5, same_length=True),
        "places": write_checkpoint(
            folder / "places.pt",
            "transformer_xl",
            positions="learned-absolute",
            mem_len=0,
            extended_context=4,
        ),
        "AA": write_checkpoint(folder / "aa.pt", "all_attention_lm"),
    }


def losses_of(folder, *names, positions=60, stride=1, batch_size=4, output="losses"):
    checkpoints = [NamedFile(name, folder / name) for name in names]
    (folder / output).mkdir(exist_ok=True)
    windows = Windows(folder / "bin", "test", positions, stride, batch_size)
    return ContextLosses(checkpoints, windows, folder / output, CPU)


def unlimited(folder, name):
    """The model of a checkpoint, without memory and with all that a window holds in sight."""
    task = measure_recl.load_task(folder / "bin", 1)
    return measure_recl.load_language_model(folder / name, task, measure_recl.WITHOUT_MEMORY, CPU)


@pytest.mark.parametrize("name", ["xl.pt", "aa.pt", "places.pt"])
@pytest.mark.parametrize("context", [1, 2, 9])
def test_stride_1_reads_exactly_the_context(folder, text, models, name, context):
    losses = losses_of(folder, name)(0, context)
    model = unlimited(folder, name)
    for position in range(context, len(text), 5):
        inputs = text[position - context : position]
        expected = token_losses(model, inputs, text[position - context + 1 : position + 1])[-1]
        assert losses[position] == pytest.approx(expected, abs=1e-5)


def test_a_stride_reads_up_to_one_token_less_than_it_more(folder, text, models):
    losses, model = (
        losses_of(folder, "xl.pt", stride=4, batch_size=3)(0, 6),
        unlimited(folder, "xl.pt"),
    )
    for begin in range(8, len(text) - 3, 4):
        inputs, targets = text[begin - 6 : begin + 3], text[begin - 5 : begin + 4]
        np.testing.assert_allclose(
            losses[begin : begin + 4], token_losses(model, inputs, targets)[-4:], atol=1e-5
        )


def test_absolute_positions_limit_the_context(folder, models):
    losses = losses_of(folder, "places.pt", stride=3)
    assert losses.limits == [10]
    np.testing.assert_array_equal(losses(0, 100), losses(0, 10))
    assert losses.contexts(0) == [10]
    message = "--stride is 13: places was trained on segments of 12 tokens; give a stride of at"
    with pytest.raises(ValueError, match=message):
        context_limit(NamedFile("places", folder / "places.pt"), 13)
    assert context_limit(NamedFile("XL", folder / "xl.pt"), 13) is None


def test_losses_are_measured_once_and_kept(folder, models, monkeypatch):
    first = losses_of(folder, "xl.pt", output="kept")(0, 3)
    calls = []
    monkeypatch.setattr(measure_recl, "score_text", lambda *a: calls.append(a) or np.zeros(60))
    again = losses_of(folder, "xl.pt", output="kept")
    np.testing.assert_array_equal(again(0, 3), first)
    assert again(0, 3) is again(0, 3)
    assert first.dtype == again(0, 3).dtype == np.float32
    assert calls == []
    again(0, 4)
    losses_of(folder, "xl.pt", output="kept", stride=2)(0, 3)
    losses_of(folder, "aa.pt", output="kept")(0, 3)
    assert len(calls) == 3


def test_another_checkpoint_at_the_same_path_is_measured_anew(folder, models, tmp_path):
    write_text(tmp_path / "bin", 60)
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl", seed=1)
    first = losses_of(tmp_path, "xl.pt")(0, 3)
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl", seed=2)
    assert not np.array_equal(losses_of(tmp_path, "xl.pt")(0, 3), first)


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_kept_losses_that_cannot_be_read_are_refused(folder, models, damage):
    losses_of(folder, "xl.pt", output=damage)(0, 3)
    (path,) = (folder / damage).iterdir()
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
        message = f"{path} cannot be read"
    else:
        with path.open("wb") as stream:
            np.savez(stream, losses=np.zeros(60, np.float32), key=np.array("{}"))
        message = f"{path} holds losses of something else: remove it, and it is measured anew"
    with pytest.raises(ValueError, match=re.escape(message)):
        losses_of(folder, "xl.pt", output=damage)(0, 3)


def words(folder, *options):
    return [
        *("--data", str(folder / "bin"), "--cpu", "--step", "2", "--max-context", "8"),
        *("--threshold", "0.0001", "--stride", "2", *options),
    ]


def test_the_script_measures_a_group(folder, models, tmp_path, capsys):
    checkpoints = [f"{name}={folder / path}.pt" for name, path in [("XL", "xl"), ("P", "places")]]
    options = words(folder, "--output", str(tmp_path), "--checkpoint", *checkpoints)
    assert measure_recl.main(options) == 0
    printed = capsys.readouterr().out
    assert "test of " in printed
    assert (
        "52 positions of 60 tokens scored; stride 2: a context of c tokens is c to c + 1" in printed
    )
    assert "| model   |   r = 0.1 |   r = 0.5 |   r = 1.0 |" in printed
    result = json.loads((tmp_path / "recl.json").read_text())
    assert result["contexts"] == {"first": 2, "step": 2, "longest": 8}
    kept = losses_of(folder, "xl.pt", "places.pt", stride=2, batch_size=8)
    for number, name in enumerate(["XL", "P"]):
        for ratio in (0.1, 0.5, 1.0):
            expected = effective_context(
                lambda model, context: kept(model, context)[8:],
                2,
                number,
                Contexts(2, 2, 8),
                ratio,
                0.0001,
            )
            found = result["models"][name]["recl"][str(ratio)]
            assert (found["tokens"], found["bound"]) == (expected.tokens, expected.bound)
            assert found["gains"] == [gain._asdict() for gain in expected.gains]
    perplexity = result["models"]["XL"]["perplexity"]["2"]
    assert perplexity == pytest.approx(np.exp(kept(0, 2)[8:].mean()), rel=1e-5)
    assert (tmp_path / "recl.png").stat().st_size > 5000


def test_an_interrupted_measurement_goes_on(folder, models, tmp_path, capsys, monkeypatch):
    options = words(folder, "--output", str(tmp_path), "--checkpoint", f"XL={folder}/xl.pt")
    score, contexts = measure_recl.score_text, []

    def interrupted_in_the_second(model, task, *rest):
        contexts.append(task.cfg.extended_context + 1)
        if len(contexts) == 2:
            raise KeyboardInterrupt
        return score(model, task, *rest)

    monkeypatch.setattr(measure_recl, "score_text", interrupted_in_the_second)
    assert measure_recl.main(options) == 130
    assert "/losses keeps what was measured; the same command goes on" in capsys.readouterr().err
    assert measure_recl.main(options) == 0
    assert contexts[:3] == [2, 4, 4]
    assert len(contexts) == len(set(contexts)) + 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--stride", "0"], "--stride is 0: it must be at least 1"),
        (["--batch-size", "0"], "--batch-size is 0: it must be at least 1"),
        (["--threshold", "0"], "--threshold is 0.0: it must be between 0 and 1"),
        (["--ratios", "0,1"], "--ratios is '0,1': a share of 0 leaves no positions"),
        (["--ratios", "2"], "--ratios is '2': give numbers from 0 to 1 with commas between them"),
        (["--first-context", "7"], "--max-context is 8: it must be at least --first-context plus"),
        (["--max-tokens", "8"], "--max-context is 8 and the text has 8 tokens, of which none has"),
        (["--split", "dev"], "--split dev: no data at"),
        (["--checkpoint", "none.pt"], "--checkpoint none.pt is no file"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(folder, models, refused, options, message):
    common = words(folder, "--checkpoint", f"{folder}/xl.pt")
    refused(measure_recl.main, [*common, *options], message)


def test_bounds_have_signs():
    signs = [measure_recl.format_tokens({"bound": b, "tokens": 9}) for b in ("exact", "at most")]
    assert [*signs, measure_recl.format_tokens({"bound": "at least", "tokens": 9})] == [
        "9",
        "≤ 9",
        "≥ 9",
    ]
