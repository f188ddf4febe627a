import shutil
import sys

import numpy as np
import pytest

from scripts.convert import check_parity
from tests.end_to_end.commands import run_child
from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    adaptive_span,
    transformer_xl,
    transformer_xl_tensorflow,
)
from tests.scripts.tables import cells

HEADER = [
    *("case", "setting", "tokens compared", "largest difference", "root mean square"),
    *("the original's own", "perplexity", "agrees"),
]
ROUNDING = "within the original's rounding"
SEGMENTS = {"t7": {"tgt_len": 7, "mem_len": 10, "same_length": False, "clamp_len": -1}}
BLOCKS = {"t7": {"block_size": 7}, "t1": {"block_size": 1}}


def rows_of(printed):
    """The table's rows, without its header and rule, as lists of cells."""
    header, _, *rows = cells(printed)
    assert header == HEADER
    return rows


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A case of a Transformer-XL with clusters, and the losses that the commands give for it."""
    folder = tmp_path_factory.mktemp("cases")
    losses = transformer_xl(CUTOFFS, 2).write_case(folder / "xl", SEGMENTS)
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        read = check_parity.read_losses

        def recorded(*arguments):
            found["t7"] = read(*arguments)
            return found["t7"]

        patch.setattr(check_parity, "read_losses", recorded)
        patch.setattr(check_parity, "run_quietly", run_child)
        status = check_parity.main([str(folder)])
    return folder, losses, found, status


def of_case(monkeypatch, losses):
    """Let the script find these losses, a setting after the other, without running commands."""
    left = iter(losses)
    monkeypatch.setattr(check_parity, "import_case", lambda *_: None)
    monkeypatch.setattr(check_parity, "read_losses", lambda *_: next(left))


def change(folder, name, difference):
    """Change a loss in the middle of a case's expected.npz."""
    with np.load(folder / "expected.npz") as file:
        expected = dict(file)
    expected[name][11] += difference
    np.savez(folder / "expected.npz", **expected)


def test_a_case_goes_the_way_of_a_user_and_agrees(scored):
    _, losses, found, status = scored
    assert status == 0
    np.testing.assert_allclose(found["t7"], losses["t7"], atol=check_parity.TOLERANCE)


def test_the_table(scored, monkeypatch, capsys):
    folder, losses, found, _ = scored
    of_case(monkeypatch, [found["t7"]])
    assert check_parity.main([str(folder)]) == 0
    printed = capsys.readouterr().out
    (row,) = rows_of(printed)
    assert row[:3] == ["xl", "t7", "54"]
    assert float(row[3]) < 2e-4
    perplexity = np.exp(losses["t7"].mean())
    assert float(row[4]) <= float(row[3])
    assert row[5:] == ["0.0e+00", f"{perplexity:.2f}", "yes"]
    assert printed.splitlines()[-1] == (
        "1 of 1 settings agree within 0.0002 nats, token by token; 0 differ by more, but not "
        "more than the original's rounding explains; 0 missed"
    )


@pytest.mark.parametrize(("difference", "status"), [(1e-4, 0), (1e-3, 1), (-1e-3, 1)])
def test_a_changed_loss_is_found(tmp_path, monkeypatch, capsys, difference, status):
    losses = transformer_xl(CUTOFFS, 2).write_case(tmp_path / "xl", SEGMENTS)
    change(tmp_path / "xl", "t7", difference)
    of_case(monkeypatch, losses.values())
    assert check_parity.main([str(tmp_path)]) == status
    printed = capsys.readouterr().out
    ((_, _, _, largest, *_, agrees),) = rows_of(printed)
    assert (largest, agrees) == (f"{abs(difference):.1e}", "NO" if status else "yes")
    assert f"\n{1 - status} of 1 settings agree" in printed


def test_a_loss_that_is_no_number_does_not_agree(tmp_path, monkeypatch, capsys):
    losses = transformer_xl().write_case(tmp_path / "xl", SEGMENTS)
    losses["t7"][3] = np.nan
    of_case(monkeypatch, losses.values())
    assert check_parity.main([str(tmp_path)]) == 1
    assert rows_of(capsys.readouterr().out)[0][-1] == "NO"


@pytest.mark.parametrize(
    ("foreign", "moves"),
    [
        (transformer_xl(CUTOFFS), True),
        (transformer_xl(), False),
        (transformer_xl(CUTOFFS, hugging_face=True), False),
        (transformer_xl_tensorflow(CUTOFFS), False),
        (adaptive_span(cutoffs=CUTOFFS), False),
    ],
    ids=["txl-adaptive", "txl-plain", "hf-adaptive", "tf-adaptive", "adaptive-io"],
)
def test_clusters_are_in_the_originals_order_where_it_has_one(
    tmp_path, monkeypatch, foreign, moves
):
    settings = BLOCKS if foreign.source == "adaptive-span" else SEGMENTS
    losses = foreign.write_case(tmp_path / "case", settings)
    with np.load(tmp_path / "case" / "expected.npz") as expected:
        assert np.array_equal(expected["t7"], losses["t7"]) != moves
    of_case(monkeypatch, losses.values())
    assert check_parity.main([str(tmp_path)]) == 0


def test_the_originals_rounding_is_allowed_for(tmp_path, monkeypatch, capsys):
    losses = adaptive_span().write_case(tmp_path / "span", BLOCKS)
    change(tmp_path / "span", "t1", 0.009)
    of_case(monkeypatch, losses.values())
    assert check_parity.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    rounding = f"{0.009 / np.sqrt(len(losses['t1'])):.1e}"
    assert rows_of(printed)[1][3:6] == ["9.0e-03", rounding, rounding]
    assert rows_of(printed)[1][7] == ROUNDING
    assert "1 of 2 settings agree" in printed
    assert "1 differ by more, but not more than the original's rounding explains" in printed


@pytest.mark.parametrize(
    ("tokens", "difference", "status"),
    [
        # below and above 1.5 times the original's root mean square, which is 0.009 / √54
        (slice(20, 22), 0.009, 0),
        (slice(20, 23), 0.009, 1),
        (slice(None), 0.0018, 0),
        (slice(None), 0.0019, 1),
        # at one token, below and above the most allowed
        (slice(20, 21), 0.0095, 0),
        (slice(20, 21), 0.0105, 1),
    ],
)
def test_more_than_the_originals_rounding_is_missed(
    tmp_path, monkeypatch, capsys, tokens, difference, status
):
    losses = adaptive_span().write_case(tmp_path / "span", BLOCKS)
    assert len(losses["t1"]) == 54
    change(tmp_path / "span", "t1", 0.009)
    losses["t7"][tokens] += difference
    of_case(monkeypatch, losses.values())
    assert check_parity.main([str(tmp_path)]) == status
    assert rows_of(capsys.readouterr().out)[0][-1] == ("NO" if status else ROUNDING)


def test_settings_of_the_others_make_a_difference(tmp_path, monkeypatch):
    settings = {**SEGMENTS, "t1": {"tgt_len": 1, "mem_len": 3}}
    losses = transformer_xl().write_case(tmp_path / "xl", settings)
    assert np.abs(losses["t7"] - losses["t1"]).max() > 0.01
    change(tmp_path / "xl", "t1", 1e-3)
    of_case(monkeypatch, losses.values())
    assert check_parity.main([str(tmp_path)]) == 1


def test_missing_tokens_are_refused(tmp_path, monkeypatch, capsys):
    losses = transformer_xl().write_case(tmp_path / "xl", SEGMENTS)
    of_case(monkeypatch, [losses["t7"][:-1]])
    assert check_parity.main([str(tmp_path)]) == 1
    assert "error: xl, t7: 53 tokens were scored, not 54" in capsys.readouterr().err


def test_cases_of_a_source_that_nothing_reads_are_named(scored, tmp_path, monkeypatch, capsys):
    folder, _, found, _ = scored
    of_case(monkeypatch, [found["t7"]])
    for name in ("xl", "other"):
        shutil.copytree(folder / "xl", tmp_path / name)
    config = (folder / "xl" / "config.json").read_text()
    (tmp_path / "other" / "config.json").write_text(config.replace('"transformer-xl"', '"paper"'))
    assert check_parity.main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert [row[0] for row in rows_of(printed)] == ["xl"]
    assert printed.endswith("Left out, as nothing here reads their source: other (paper)\n")
    shutil.rmtree(tmp_path / "xl")
    assert check_parity.main([str(tmp_path)]) == 1
    message = "has no case of transformer-xl, transformer-xl-tensorflow, adaptive-span, "
    message += "huggingface-transfo-xl, only other (p"
    assert message in capsys.readouterr().err


def test_a_folder_without_cases_is_refused(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert check_parity.main([str(tmp_path)]) == 1
    message = f"error: {tmp_path} has no case: no folder with expected.npz"
    assert message in capsys.readouterr().err


def test_a_command_that_fails_is_shown_with_its_last_lines():
    script = "import sys; print(*range(30), sep='\\n'); print('why', file=sys.stderr); sys.exit(3)"
    lines = "\n".join([*map(str, range(19, 30)), "why"])
    with pytest.raises(ValueError, match=f"ended with exit status 3:\n{lines}$"):
        check_parity.run_quietly([sys.executable, "-c", script])


@pytest.mark.parametrize(
    ("setting", "length", "overrides"),
    [
        ({"block_size": 3}, "3", "{}"),
        (
            {"tgt_len": 20, "mem_len": 64, "same_length": True, "clamp_len": 40},
            "20",
            "{'mem_len': 64, 'clamp_len': 40, 'same_length': True}",
        ),
        ({"tgt_len": 1, "clamp_len": -1}, "1", "{'clamp_len': None}"),
    ],
)
def test_settings_go_to_the_command_and_its_words_come_back(
    tmp_path, monkeypatch, setting, length, overrides
):
    asked = []

    def printed(words):
        asked.extend(words)
        return "loaded [x]\na [-1.500000] é [0.000000] [b] [-inf] </s> [nan] \nLoss (base 2): 3.0"

    monkeypatch.setattr(check_parity, "run_quietly", printed)
    losses = check_parity.read_losses(tmp_path, setting)
    np.testing.assert_array_equal(losses, [1.5, 0.0, np.inf, np.nan])
    options = dict(zip(asked, [*asked[1:], ""], strict=True))
    assert options["--tokens-per-sample"] == length
    assert options["--model-overrides"] == overrides
    assert options["--path"] == str(tmp_path / "model" / "checkpoint.pt")


@pytest.mark.parametrize(
    ("foreign", "weights"),
    [(transformer_xl_tensorflow(CUTOFFS), "model.pt.index"), (transformer_xl(), "model.pt")],
)
def test_the_weights_of_a_case_are_found(tmp_path, monkeypatch, foreign, weights):
    foreign.write_case(tmp_path, SEGMENTS)
    commands = []
    monkeypatch.setattr(check_parity, "run_quietly", commands.append)
    check_parity.import_case(tmp_path, check_parity.read_config(tmp_path), tmp_path / "imported")
    words = commands[0]
    assert words[words.index("--source") + 1] == foreign.source
    assert words[words.index("--checkpoint") + 1] == str(tmp_path / weights)


def test_cases_have_symbols_of_all_clusters(tmp_path):
    transformer_xl(CUTOFFS).write_case(tmp_path, SEGMENTS)
    words = set((tmp_path / "text.txt").read_text(encoding="utf-8").split())
    for first, last in zip([0, *CUTOFFS], [*CUTOFFS, len(SYMBOLS)], strict=True):
        assert words & set(SYMBOLS[first:last])


def test_a_case_that_lacks_something_is_refused(tmp_path, capsys):
    case = tmp_path / "xl"
    transformer_xl(CUTOFFS, 2).write_case(case, SEGMENTS)
    with np.load(case / "expected.npz") as file:
        np.savez(case / "expected.npz", other=file["t7"])
    assert check_parity.main([str(tmp_path)]) == 1
    assert "xl: expected.npz has no t7" in capsys.readouterr().err
    (case / "config.json").write_text('{"source": "transformer-xl"}', encoding="utf-8")
    assert check_parity.main([str(tmp_path)]) == 1
    assert "xl: config.json lacks settings" in capsys.readouterr().err
