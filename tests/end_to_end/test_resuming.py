"""A resumed training ends where the unbroken one would, and says why where that is at once."""

import re

import pytest

from tests.end_to_end.commands import train
from tests.end_to_end.results import EXACT, assert_equal, parameters

# epochs of four updates
SHORT = ("--tokens-per-sample", 60)
# nothing improves
PATIENT = (*SHORT, "--lr", 0, "--patience", 3)
# too little to count as better
PLATEAU = (*SHORT, "--lr", 1e-7, "--lr-scheduler", "reduce_lr_on_plateau", "--lr-patience", 1)
PLATEAU += ("--lr-shrink", 0.5)


def epochs(printed):
    return [int(number) for number in re.findall(r"end of epoch (\d+) \(", printed)]


def rates(printed):
    return re.findall(r"^.*\| epoch \d+ \|.*\| lr (\S+)", printed, re.MULTILINE)


def test_patience_is_what_it_was(data, tmp_path):
    assert epochs(train(data, tmp_path, *PATIENT, "--max-epoch", 3)) == [1, 2, 3]
    assert epochs(train(data, tmp_path, *PATIENT, "--max-epoch", 9)) == [4]
    # and then it is complete, until more is given
    printed = train(data, tmp_path, *PATIENT, "--max-epoch", 9)
    assert epochs(printed) == []
    assert "has not improved in 3 validations, and --patience is 3; give more" in printed
    assert epochs(train(data, tmp_path, *PATIENT, "--patience", 5, "--max-epoch", 9)) == [5, 6]


def test_a_plateau_scheduler_goes_on(data, tmp_path):
    expected = rates(train(data, tmp_path / "whole", *PLATEAU, "--max-epoch", 6))
    assert len(expected) == 6
    assert len(set(expected)) == 3
    found = []
    for most in (1, 3, 6):
        found += rates(train(data, tmp_path / "broken", *PLATEAU, "--max-epoch", most))
    assert found == expected
    assert_equal(parameters(tmp_path / "broken"), parameters(tmp_path / "whole"), **EXACT)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--max-update", 2), r"has \d+ updates, and --max-update is 2"),
        (("--max-epoch", 2, "--stop-time-hours", 1e-9), r"took 0\.00 hours, and --stop-time-hours"),
    ],
)
def test_a_complete_training_says_why_it_ends(data, tmp_path, options, reason):
    train(data, tmp_path, *SHORT, "--max-epoch", 1, "--disable-validation")
    before = parameters(tmp_path)
    printed = train(data, tmp_path, *SHORT, *options, "--disable-validation")
    assert re.search(rf"nothing is left to train: .* in --save-dir {tmp_path} {reason}", printed)
    assert_equal(parameters(tmp_path), before, **EXACT)
