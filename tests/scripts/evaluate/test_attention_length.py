import argparse
import json
import re

import numpy as np
import pytest

from scripts._shared.command_line import NamedFile
from scripts.evaluate import attention_length as plot_attention_length
from scripts.evaluate.attention_length import (
    PART_TOKENS,
    PARTS,
    AttentionLength,
    check_length,
    format_difference,
    paired_difference,
    parse_lengths,
)
from tests.scripts.evaluate.saved_models import token_losses, write_checkpoint, write_text
from tests.scripts.tables import cells

EOS = 2


@pytest.fixture(scope="module")
def text(folder):
    return write_text(folder / "bin", 60)


@pytest.fixture(scope="module")
def models(folder, text):
    absolute = {"mem_len": 0, "extended_context": 4}
    return {
        "xl": write_checkpoint(folder / "xl.pt", "transformer_xl", clamp_len=7),
        "aa": write_checkpoint(folder / "aa.pt", "all_attention_lm"),
        **{
            name: write_checkpoint(
                folder / f"{name}.pt", "transformer_xl", positions=f"{name}-absolute", **absolute
            )
            for name in ("learned", "sinusoidal")
        },
    }


def options(**values):
    unset = {"mem_len": None, "extended_context": None, "clamp_len": None, "same_length": None}
    return argparse.Namespace(**{**unset, **values})


def test_lengths_of_memory_have_the_same_length_as_the_paper_s():
    assert parse_lengths(options(mem_len="256,128", clamp_len="90,9")) == [
        AttentionLength(128, 0, True, 9),
        AttentionLength(256, 0, True, 9),
        AttentionLength(128, 0, True, 90),
        AttentionLength(256, 0, True, 90),
    ]
    assert parse_lengths(options(mem_len="0,3", same_length=False))[0] == (0, 0, False, None)


def test_lengths_of_context_go_without_memory():
    assert parse_lengths(options(extended_context="0,5")) == [
        AttentionLength(0, 0, False, None),
        AttentionLength(0, 5, False, None),
    ]


def test_overrides_leave_a_trained_clamp_alone():
    assert AttentionLength(4, 0, True, None).overrides() == {"mem_len": 4, "same_length": True}
    assert AttentionLength(4, 0, True, 3).overrides()["clamp_len"] == 3


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mem_len": "4", "clamp_len": "0"}, "--clamp-len is '0': give numbers at least 1"),
        ({"mem_len": "0,4"}, "--mem-len is '0,4': a memory of 0 tokens with --same-length leaves"),
        ({"mem_len": "-1"}, "--mem-len is '-1': give numbers at least 0"),
        ({"extended_context": "x"}, "--extended-context is 'x': give numbers at least 0"),
        (
            {"extended_context": "4", "same_length": True},
            "--same-length acts on a memory: drop it, or give --mem-len",
        ),
    ],
)
def test_lengths_that_cannot_be_are_refused(values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_lengths(options(**values))


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        (
            "learned",
            AttentionLength(3, 0, False, None),
            "--mem-len 3: L has --positions learned-absolute, which go without a memory; give "
            "--extended-context in its place",
        ),
        (
            "sinusoidal",
            AttentionLength(0, 3, False, 5),
            "--clamp-len 5: L has --positions sinusoidal-absolute, which encode no distances",
        ),
        (
            "aa",
            AttentionLength(7, 0, True, None),
            "--mem-len 7: L attends to --attention-span 6 tokens and no more",
        ),
        (
            "learned",
            AttentionLength(0, 5, False, None),
            "--extended-context 5 with --tokens-per-sample 8: L has vectors of 12 places",
        ),
    ],
)
def test_a_length_that_a_model_cannot_have_is_refused(folder, models, name, length, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_length(NamedFile("L", folder / f"{name}.pt"), length, 8)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        ("xl", AttentionLength(900, 0, True, 3)),
        ("xl", AttentionLength(0, 900, False, None)),
        ("aa", AttentionLength(6, 0, True, None)),
        ("learned", AttentionLength(0, 4, False, None)),
        ("sinusoidal", AttentionLength(0, 900, False, None)),
    ],
)
def test_a_length_that_a_model_can_have_is_taken(folder, models, name, length):
    check_length(NamedFile("L", folder / f"{name}.pt"), length, 8)


def test_a_difference_has_the_interval_of_the_means_of_parts():
    generator = np.random.default_rng(0)
    length = PARTS * PART_TOKENS + 7
    reference = generator.random(length, dtype=np.float32)
    # the first 7 parts have one token more
    of_parts = generator.normal(size=PARTS)
    sizes = [PART_TOKENS + 1] * 7 + [PART_TOKENS] * (PARTS - 7)
    differences = np.repeat(of_parts, sizes)
    mean, half = paired_difference((reference + differences).astype(np.float32), reference)
    assert mean == pytest.approx(differences.mean(), abs=1e-6)
    assert half == pytest.approx(2.0395 * of_parts.std(ddof=1) / np.sqrt(32), abs=1e-6)
    short = reference[: PARTS * PART_TOKENS - 1]
    assert paired_difference(short + 1, short) == (pytest.approx(1, abs=1e-6), None)


def test_the_interval_holds_where_neighbours_depend_on_one_another():
    generator = np.random.default_rng(0)
    length, reach, texts = PARTS * PART_TOKENS, 100, 400
    held = naive = 0
    for _ in range(texts):
        # running means of 100 draws, around 0
        sums = generator.normal(size=length + reach).cumsum()
        losses = (sums[reach:] - sums[:-reach]) / reach
        mean, half = paired_difference(losses, np.zeros(length))
        held += abs(mean) <= half
        naive += abs(mean) <= 1.96 * losses.std() / np.sqrt(length)
    # two standard deviations of the share of 400 draws are 0.02
    assert held / texts == pytest.approx(0.95, abs=0.025)
    assert naive / texts < 0.3


@pytest.mark.parametrize(
    ("difference", "half", "told"),
    [(None, None, ""), (-0.01234, None, "-0.0123"), (0.5, 0.25, "+0.5000 ± 0.2500")],
)
def test_a_difference_is_told_with_its_interval(difference, half, told):
    assert format_difference({"nats_difference": difference, "nats_half_interval": half}) == told


def words(folder, output, *others):
    common = ("--data", str(folder / "bin"), "--tokens-per-sample", "8", "--cpu")
    return [*common, "--output", str(output), *others]


def test_the_script_sweeps_memories(folder, text, models, tmp_path, capsys):
    checkpoints = [f"XL={folder}/xl.pt", f"AA={folder}/aa.pt"]
    sweep = ("--checkpoint", *checkpoints, "--mem-len", "2,6", "--batch-size", "3")
    assert plot_attention_length.main(words(folder, tmp_path, *sweep, "--max-tokens", "50")) == 0
    printed = capsys.readouterr().out
    assert f"test of {folder}/bin: only the first 50 of 60 tokens" in printed
    rows = json.loads((tmp_path / "attention_length.json").read_text())["rows"]
    assert [(row["model"], row["mem_len"], row["clamp_len"]) for row in rows] == [
        ("XL", 2, 7),
        ("XL", 6, 7),
        ("AA", 2, None),
        ("AA", 6, None),
    ]
    for row in rows:
        assert (row["tokens"], row["tokens_of_split"], row["streams"], row["segment"]) == (
            50,
            60,
            3,
            8,
        )
        assert row["same_length"] is True
        assert row["loss"] == pytest.approx(row["nats"] / np.log(2))
    headers, _, first, *_ = cells(printed)
    assert headers == [
        *("model", "memory", "extended context", "clamp", "same length", "segment", "streams"),
        *("tokens", "bits per character", "nats against the first", "seconds"),
    ]
    assert first[:9] == ["XL", "2", "0", "7", "yes", "8", "3", "50", f"{rows[0]['loss']:.4f}"]
    assert [row["nats_difference"] for row in rows[::2]] == [None, None]
    for row, first in (rows[1], rows[0]), (rows[3], rows[2]):
        assert row["nats_difference"] == pytest.approx(row["nats"] - first["nats"], abs=1e-7)
        assert row["nats_half_interval"] is None
    best = min(rows[:2], key=lambda row: row["loss"])
    assert f"XL: best at {best['mem_len']} tokens, clamp 7, {best['loss']:.4f} bits" in printed
    assert (tmp_path / "attention_length.png").stat().st_size > 5000


def test_the_script_sweeps_clamps(folder, text, models, tmp_path, capsys):
    sweep = ("--checkpoint", f"XL={folder}/xl.pt", "--mem-len", "6,9", "--clamp-len", "7,3")
    assert plot_attention_length.main(words(folder, tmp_path, *sweep)) == 0
    rows = json.loads((tmp_path / "attention_length.json").read_text())["rows"]
    lengths = [(row["clamp_len"], row["mem_len"]) for row in rows]
    assert lengths == [(3, 6), (3, 9), (7, 6), (7, 9)]
    differences = [row["nats"] - rows[0]["nats"] for row in rows[1:]]
    assert [row["nats_difference"] for row in rows[1:]] == pytest.approx(differences, abs=1e-7)
    assert 0 not in differences
    best = min(rows, key=lambda row: row["loss"])
    told = f"XL: best at {best['mem_len']} tokens, clamp {best['clamp_len']}, {best['loss']:.4f} "
    assert told in capsys.readouterr().out


def test_the_script_sweeps_contexts_without_memory(folder, text, models, tmp_path, capsys):
    sweep = ("--checkpoint", f"{folder}/sinusoidal.pt", "--extended-context", "0,100")
    assert plot_attention_length.main(words(folder, tmp_path, *sweep)) == 0
    assert f"test of {folder}/bin: all of 60 tokens" in capsys.readouterr().out
    rows = json.loads((tmp_path / "attention_length.json").read_text())["rows"]
    assert [(row["mem_len"], row["extended_context"]) for row in rows] == [(0, 0), (0, 100)]
    inputs = np.concatenate([[EOS], text[:-1]])
    whole = token_losses(models["sinusoidal"], inputs, text)
    assert rows[1]["nats"] == pytest.approx(whole.mean(), abs=1e-5)


def test_nothing_is_measured_where_a_length_cannot_be(folder, models, tmp_path, refused):
    sweep = ("--checkpoint", f"{folder}/xl.pt", f"L={folder}/learned.pt", "--mem-len", "2,3")
    message = "--mem-len 2: L has --positions learned-absolute"
    refused(plot_attention_length.main, words(folder, tmp_path, *sweep), message)


def test_an_interrupted_sweep_keeps_its_figures(folder, models, tmp_path, capsys, monkeypatch):
    measure, done = plot_attention_length.measure, []

    def interrupted_in_the_second(*arguments):
        if done:
            raise KeyboardInterrupt
        done.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(plot_attention_length, "measure", interrupted_in_the_second)
    sweep = ("--checkpoint", f"{folder}/xl.pt", "--mem-len", "2,3")
    assert plot_attention_length.main(words(folder, tmp_path, *sweep)) == 130
    assert "attention_length.json keeps the figures so far" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "attention_length.json").read_text())["rows"]) == 1
