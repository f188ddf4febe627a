"""Learning curves from the logs of trainings."""

import pytest

from scripts._shared.command_line import NamedFile
from scripts.inspect._curves import learning_curves, read_log

# what fairseq-train writes to --log-file with --log-format json, and what it prints by default
JSON_LOG = """\
{'_name': None, 'common': {'_name': None, 'log_interval': 5, 'log_format': 'json'}}
begin dry-run validation on "valid" subset
{"epoch": 1, "update": 0.27, "loss": "2.985", "ppl": "7.92", "num_updates": "10", "lr": "0.07", \
"train_wall": "60", "wall": "70"}
{"epoch": 1, "valid_loss"{"epoch": 1, "valid_loss": "9", "valid_num_updates": "1500"}
[2026-11-28 17:55:01,123][valid][INFO] - {"epoch": 1, "valid_loss": "3.059", "valid_ppl": "8.33", \
"valid_num_updates": "10"}
{"epoch": 1, "valid_loss": "2.5", "valid_nll_loss": "2.0", "valid_span_mean_1": "33.5", \
"valid_span_max": "60", "valid_num_updates": "20"}
{"epoch": 1, "valid_loss": "nan", "valid_num_updates": "30"}
{"epoch": 1, "valid_loss": "2.
"""
SIMPLE_LOG = """\
2026-01-31 19:41:58 | INFO | train_inner | epoch 001:     10 / 37 loss=2.985, num_updates=10
2026-01-31 19:41:58 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 3.06 | ppl 8.33 \
| wps 106499 | num_updates 10
2026-01-31 19:41:58 | INFO | test | epoch 001 | valid on 'test' subset | loss 9.9 | ppl 955 \
| num_updates 10
epoch 002 | valid on 'valid' subset | loss 3.01 | ppl 8.06 | num_updates 20
epoch 002 | valid on 'valid' subset | loss 2.95 | ppl 7.73 | num_updates 20 | best_loss 2.95
"""


@pytest.fixture
def write_log(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return NamedFile(name, tmp_path / name)

    return write


def test_losses_are_read_by_update_and_by_minute(write_log):
    losses, spans = read_log(write_log("a", JSON_LOG))
    # of label smoothing, the loss without it; a line cut short and a diverged loss are left out
    assert losses["validation"] == {"updates": [10, 20], "minutes": [1, 1], "y": [3.059, 2.0]}
    assert losses["training"] == {"updates": [10], "minutes": [1], "y": [2.985]}
    assert {name: series["y"] for name, series in spans.items()} == {
        ("mean span", "span_mean_1"): [33.5],
        ("largest span", "span_max"): [60],
    }
    # the later of two lines about an update counts
    validation = read_log(write_log("b", SIMPLE_LOG))[0]["validation"]
    assert (validation["updates"], validation["y"]) == ([10, 20], [3.06, 2.95])


def test_charts_are_in_the_unit_of_the_data_and_trainings_have_labels(write_log):
    logs = [write_log("a", JSON_LOG), write_log("b", SIMPLE_LOG)]
    for unit, losses in (("bits per character", [3.06, 2.95]), ("perplexity", [2**3.06, 2**2.95])):
        charts = learning_curves(logs, unit)
        lines = {line["name"]: line["y"] for line in charts["loss"]["series"] if not line["faint"]}
        assert (list(lines), lines["b"]) == (["a", "b"], losses)
        assert [line["name"] for line in charts["mean span"]["series"]] == ["a, span_mean_1"]


def test_a_log_without_validation_is_refused(write_log):
    with pytest.raises(ValueError, match=r"--log .* has no validation loss"):
        read_log(write_log("a", "begin training\n"))
