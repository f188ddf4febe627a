import json
import math

import pytest
from matplotlib.figure import Figure

from scripts.plot import losses as plot_losses
from scripts.plot._logs import read_figures
from scripts.plot.losses import known_bits, read_series

# what fairseq-train writes to --log-file with --log-format json, and what it prints by default
JSON_LOG = """\
{'_name': None, 'common': {'_name': None, 'log_interval': 5, 'log_format': 'json'}}
begin dry-run validation on "valid" subset
{"epoch": 1, "update": 0.27, "loss": "2.985", "ppl": "7.92", "num_updates": "10", "lr": "0.07", \
"train_wall": "50", "wall": "60"}
begin validation on "valid" subset
{"epoch": 1, "valid_loss"{"epoch": 1, "valid_loss": "9", "valid_num_updates": "1500"}
{"epoch": 1, "valid_loss": "3.059", "valid_ppl": "8.33", "valid_num_updates": "10"}
{"epoch": 1, "valid_loss": "2.5", "valid_ppl": "5.66", "valid_num_updates": "1200"}
{"epoch": 1, "valid_loss": "2.954", "valid_ppl": "7.75", "valid_num_updates": "1400", \
"valid_best_loss": "2.5"}
{"epoch": 1, "train_loss": "3.224", "train_num_updates": "1400", "train_lr": "0.07"}
done training in 0.4 seconds
{"epoch": 1, "valid_loss": "2.
"""
SIMPLE_LOG = """\
2026-01-31 19:41:58 | INFO | fairseq_cli.train | begin validation on "valid" subset
2026-01-31 19:41:58 | INFO | train_inner | epoch 001:     10 / 37 loss=2.985, num_updates=10
2026-01-31 19:41:58 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 3.06 | ppl 8.33 \
| wps 106499 | num_updates 10
2026-01-31 19:41:58 | INFO | test | epoch 001 | valid on 'test' subset | loss 9.9 | ppl 955 \
| num_updates 10
epoch 002 | valid on 'valid' subset | loss 3.01 | ppl 8.06 | num_updates 20
epoch 001 | loss 3.224 | ppl 9.35 | num_updates 20 | lr 0.07
2026-01-31 19:41:58 | INFO | valid | epoch 002 | valid on 'valid' subset | loss 2.95 | ppl 7.73 \
| num_updates 20 | best_loss 2.95
"""


def series(lines):
    return read_series([read_figures(line) for line in lines])


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "all.log").write_text(JSON_LOG, encoding="utf-8")
    (tmp_path / "ffn.log").write_text(SIMPLE_LOG, encoding="utf-8")
    return [f"all={tmp_path}/all.log", f"ffn={tmp_path}/ffn.log"]


@pytest.mark.parametrize("log", [JSON_LOG, SIMPLE_LOG], ids=["json", "simple"])
def test_a_line_cut_short_is_skipped(log):
    line = next(line for line in log.splitlines() if series([line])["updates"])
    # do not cut within the number of updates: the rest would be a number, too
    for length in range(line.rindex("10")):
        assert series([line[:length].rstrip()])["updates"] == []


def test_figures_are_printed_and_written(logs, tmp_path, capsys):
    output = tmp_path / "a" / "losses"
    assert plot_losses.main(["--log", *logs, "--output", str(output)]) == 0
    found = json.loads((output / "losses.json").read_text(encoding="utf-8"))
    assert found["unit"] == "bits a token"
    first, second = found["rows"]
    assert first == {
        "training": "all",
        "log": f"{tmp_path}/all.log",
        "updates": [10, 1200, 1400],
        "losses": [3.059, 2.5, 2.954],
        "seconds": [50.0, 50.0, 50.0],
        "training_losses": [2.985, 2.985, 2.985],
        "last": {"update": 1400, "loss": 2.954},
        "smallest": {"update": 1200, "loss": 2.5},
    }
    # the later of the two lines about update 20
    assert (second["updates"], second["losses"]) == ([10, 20], [3.06, 2.95])
    assert second["seconds"] == [None, None]
    printed = capsys.readouterr().out
    assert all(f" {figure} |" in printed for figure in ("1,400", "2.954", "1,200", "2.500"))
    assert {path.name for path in output.iterdir()} == {"losses.json", "losses.png"}


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('begin validation on "valid" subset\n', "", "--log LOG has no validation loss: "),
        (JSON_LOG.replace("2.954", "nan"), "", "--log LOG: the validation loss after 1,400 upd"),
        (SIMPLE_LOG, "--against time", "--against time: --log LOG has no such figure"),
        (JSON_LOG, "--facts 5000", "--facts is 5000: give 16 times a square number"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, refused, content, options, message):
    log = tmp_path / "train.log"
    log.write_text(content, encoding="utf-8")
    words = ["--log", log, *options.split()]
    refused(plot_losses.main, words, message.replace("LOG", str(log)))


def test_time_is_that_of_all_updates_before():
    lines = [
        '{"num_updates": "10", "train_wall": "9", "wall": "20"}',
        '{"num_updates": "10", "train_wall": "9", "wall": "20"}',
        '{"epoch": 1, "valid_loss": "3", "valid_num_updates": "10"}',
        '{"epoch": 1, "train_loss": "3", "train_num_updates": "10", "train_wall": "25"}',
        "epoch 001:     15 / 37 loss=2.9, num_updates=15, lr=0.1, train_wall=14, wall=30",
        # resumed from the checkpoint of update 10
        "epoch 001:     15 / 37 loss=2.9, num_updates=15, lr=0.1, train_wall=5, wall=0",
        '{"epoch": 1, "valid_loss": "2", "valid_num_updates": "20"}',
        "epoch 001:     25 / 37 loss=2.9, num_updates=25, lr=0.1, train_wall=7, wall=0",
    ]
    # the second validation lies between the lines of updates 15 and 25
    assert series(lines)["seconds"] == [9.0, 17.5]
    assert series(lines[:-1])["seconds"] == [9.0, 14.0]
    assert series([lines[2], lines[-1]])["seconds"] == [2.8]
    assert series(lines[2:3])["seconds"] == [None]


def test_training_loss_is_the_mean_since_the_validation_before():
    lines = [
        '{"loss": "9", "nll_loss": "8", "num_updates": "5", "train_wall": "1"}',
        "epoch 001: 10 / 37 loss=7, nll_loss=6, ppl=9, num_updates=10, train_wall=14, wall=30",
        '{"epoch": 1, "train_loss": "1", "train_num_updates": "10", "train_wall": "25"}',
        '{"epoch": 1, "valid_loss": "3", "valid_nll_loss": "2.5", "valid_num_updates": "10"}',
        # validation at the end of an epoch, before the next training line
        '{"epoch": 1, "valid_loss": "3", "valid_num_updates": "12"}',
        '{"loss": "5", "num_updates": "15", "train_wall": "1"}',
        # an overflow is not a loss
        '{"loss": "nan", "num_updates": "18", "train_wall": "1"}',
        "2026-01-31 19:41:58 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 4.25 "
        "| nll_loss 2 | ppl 7 | num_updates 20",
    ]
    found = series(lines)
    assert found["training_losses"] == [7.0, 6.0, 5.0]
    # with label smoothing, the loss without smoothing counts
    assert found["losses"] == [2.5, 3.0, 2.0]


@pytest.mark.parametrize(
    ("against", "facts", "x", "y"),
    [
        ("updates", None, [5, 9], [3.0, 2.0]),
        ("time", None, [1.0, 1.5], [3.0, 2.0]),
        ("training-loss", None, [3.5, 2.5], [3.0, 2.0]),
        ("time", 4096, [1.0, 1.5], [0.5, 7.0]),
    ],
)
def test_what_is_drawn(against, facts, x, y):
    row = {"updates": [5, 9], "seconds": [60.0, 90.0], "training_losses": [3.5, 2.5]}
    row |= {"losses": [3.0, 2.0], "bits": [0.5, 7.0]}
    rows = [{**row, "training": name} for name in ("memory-1", "memory-2", "plain")]
    axes = Figure().add_subplot()
    plot_losses.draw(axes, rows, against, facts)
    lines = axes.get_lines()
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in lines] == [(x, y)] * 3
    # all seeds of a model have the same color
    colors = [line.get_color() for line in lines]
    assert (colors[0] == colors[1], colors[0] == colors[2]) == (bool(facts), False)


def test_facts_that_a_training_knows(tmp_path, capsys):
    # with four times as many facts, choosing one takes two more bits
    assert known_bits(math.log2(16384) / 5, 16384) == pytest.approx(8)
    lines = ["num. shared model params: 1,030,272 (num. trained: 1,030,272)"]
    # losses of a line with one of 4,096 facts: the object is unknown, half known, known
    for number, loss in ((10, (12 + 8) / 5), (20, (12 + 4) / 5), (30, 12 / 5)):
        lines += [
            f'{{"epoch": 1, "loss": "2.9", "wps": "{1000 * number}", "num_updates": "{number}", '
            '"train_wall": "60"}',
            f'{{"epoch": 1, "valid_loss": "{loss:.3f}", "valid_num_updates": "{number}"}}',
        ]
    log = tmp_path / "train.log"
    log.write_text("\n".join([*lines, ""]), encoding="utf-8")
    words = ["--log", f"memory-1={log}", f"memory-2={log}", "--output", str(tmp_path / "out")]
    assert plot_losses.main([*words, "--facts", "4096"]) == 0
    row = json.loads((tmp_path / "out/losses.json").read_text(encoding="utf-8"))["rows"][0]
    assert (row["parameters"], row["tokens_per_second"]) == (1_030_272, 20_000)
    assert (row["updates"], row["minutes"]) == ([10, 20, 30], [1, 2, 3])
    assert row["bits"] == pytest.approx([0, 4, 8])
    printed = capsys.readouterr().out
    assert all(f" {figure} |" in printed for figure in ("1,030,272", "8.00", "32,768"))
    assert (tmp_path / "out/losses.png").stat().st_size > 10_000
