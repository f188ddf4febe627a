"""Losses by attention length."""

import json

import numpy as np
import pytest

from scripts.evaluate import attention_length as measure_attention_length
from scripts.evaluate.attention_length import PART_TOKENS, PARTS, paired_difference
from tests.scripts.evaluate.saved_models import token_losses

EOS = 2


def words(folder, *others):
    return ["--data", str(folder / "bin"), "--tokens-per-sample", "8", "--cpu", *map(str, others)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--extended-context 4 --sliding-window 1", "--sliding-window needs a recurrence"),
        ("--mem-len 2 --split dev", "--data .*bin, --split dev: no data at"),
    ],
)
def test_attention_length_refuses_windows_without_recurrence_and_missing_splits(
    folder, models, check_refusal, options, message
):
    checkpoint = ("--checkpoint", f"L={folder}/xl.pt")
    check_refusal(
        measure_attention_length.main, words(folder, *checkpoint, *options.split()), message
    )


def test_a_difference_has_an_interval_from_the_means_over_its_pieces():
    generator = np.random.default_rng(0)
    length = PARTS * PART_TOKENS + 7
    reference = generator.random(length, dtype=np.float32)
    # the first 7 parts have one token more
    piece_means = generator.normal(size=PARTS)
    differences = np.repeat(piece_means, [PART_TOKENS + 1] * 7 + [PART_TOKENS] * (PARTS - 7))
    mean, half = paired_difference((reference + differences).astype(np.float32), reference)
    assert mean == pytest.approx(differences.mean(), abs=1e-6)
    assert half == pytest.approx(2.0395 * piece_means.std(ddof=1) / np.sqrt(32), abs=1e-6)
    short = reference[: PARTS * PART_TOKENS - 1]
    assert paired_difference(short + 1, short) == (pytest.approx(1, abs=1e-6), None)


def sweep(folder, output, *options):
    line = words(folder, "--output", output, *options)
    assert measure_attention_length.main(line) == 0
    assert (output / "attention_length.png").stat().st_size > 5000
    return json.loads((output / "attention_length.json").read_text())["rows"]


def test_the_script_sweeps_recurrences_and_clamps(folder, text, models, tmp_path):
    options = ("--checkpoint", f"XL={folder}/xl.pt", f"AA={folder}/aa.pt", "--mem-len", "2,6")
    rows = sweep(folder, tmp_path, *options, "--batch-size", "3", "--max-tokens", "50")
    lengths = [(row["model"], row["mem_len"], row["clamp_len"]) for row in rows]
    assert lengths == [("XL", 2, 7), ("XL", 6, 7), ("AA", 2, None), ("AA", 6, None)]
    for row in rows:
        sizes = [row[name] for name in ("tokens", "tokens_of_split", "streams", "segment")]
        assert sizes == [50, 60, 3, 8]
        assert row["loss"] == pytest.approx(row["nats"] / np.log(2))
    assert [row["nats_difference"] for row in rows[::2]] == [None, None]
    for row, first in (rows[1], rows[0]), (rows[3], rows[2]):
        assert row["nats_difference"] == pytest.approx(row["nats"] - first["nats"], abs=1e-7)
    options = ("--checkpoint", f"XL={folder}/xl.pt", "--mem-len", "6,800", "--clamp-len", "7,3")
    rows = sweep(folder, tmp_path, *options, "--sliding-window", "2")
    lengths = [(row["clamp_len"], row["mem_len"]) for row in rows]
    assert lengths == [(3, 6), (3, 800), (7, 6), (7, 800)]
    assert len({row["nats"] for row in rows}) == 4
    assert all(row["window_ms_per_token"] > 0 < row["reuse_ms_per_token"] for row in rows)


def test_the_script_sweeps_contexts_without_recurrence(folder, text, models, tmp_path):
    options = ("--checkpoint", f"{folder}/abs.pt", "--extended-context", "0,100")
    rows = sweep(folder, tmp_path, *options)
    assert [(row["mem_len"], row["extended_context"]) for row in rows] == [(0, 0), (0, 100)]
    inputs = np.concatenate([[EOS], text[:-1]])
    whole = token_losses(models, inputs, text)
    assert rows[1]["nats"] == pytest.approx(whole.mean(), abs=1e-5)


def test_an_interrupted_sweep_keeps_its_figures(folder, models, tmp_path, capsys, monkeypatch):
    measure, done = measure_attention_length.measure, []

    def interrupted_in_the_second(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(measure_attention_length, "measure", interrupted_in_the_second)
    line = words(folder, "--output", tmp_path, "--checkpoint", f"{folder}/xl.pt")
    assert measure_attention_length.main([*line, "--mem-len", "2,3"]) == 130
    assert "attention_length.json keeps the results so far" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "attention_length.json").read_text())["rows"]) == 1
