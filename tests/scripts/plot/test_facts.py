import json
import math

import pytest

from scripts.plot import facts as plot_facts

# losses of a line of one of 4,096 facts: all known, half of each object, only what is random
LOSSES = [(12 + 0) / 5, (12 + 4) / 5, (12 + 8) / 5]
LINES = [
    "num. shared model params: 1,030,272 (num. trained: 1,030,272)",
    *(
        line
        for number, loss in zip((10, 20, 30), reversed(LOSSES), strict=True)
        for line in (
            f'{{"epoch": 1, "loss": "2.9", "wps": "{1000 * number}", "num_updates": "{number}", '
            '"train_wall": "60"}',
            f'{{"epoch": 1, "valid_loss": "{loss:.3f}", "valid_num_updates": "{number}", '
            f'"valid_memory2_usage": "{number}.25"}}',
        )
    ),
]


@pytest.fixture
def log(tmp_path):
    (tmp_path / "train.log").write_text("\n".join([*LINES, ""]), encoding="utf-8")
    return tmp_path / "train.log"


def test_bits_are_what_the_loss_of_a_line_is_below_that_of_random_objects():
    found = [plot_facts.known_bits(loss, 4096) for loss in LOSSES]
    assert found == pytest.approx([8, 4, 0])
    # four times as many facts take two more bits to ask for
    assert plot_facts.known_bits(math.log2(16384) / 5, 16384) == pytest.approx(8)


def test_a_training_is_told_of(log, tmp_path, capsys):
    words = ["--facts", "4096", "--log", f"memory-1={log}", f"memory-2={log}", f"wide={log}"]
    assert plot_facts.main([*words, "--output", str(tmp_path / "out")]) == 0
    row = json.loads((tmp_path / "out/facts.json").read_text(encoding="utf-8"))["rows"][0]
    assert row["parameters"] == 1_030_272
    assert row["tokens_per_second"] == 20_000
    assert row["updates"] == [10, 20, 30]
    assert row["minutes"] == [1, 2, 3]
    assert row["usage_percent"] == 30.25
    assert row["bits"] == pytest.approx([0, 4, 8])
    printed = [cell.strip() for cell in capsys.readouterr().out.splitlines()[2].split("|")[1:-1]]
    assert printed == ["memory-1", "1,030,272", "20,000", "30", "3.0", "8.00", "32,768", "30.2%"]
    assert (tmp_path / "out/facts.png").stat().st_size > 10_000


def test_a_number_of_facts_that_cannot_be_is_refused(log, tmp_path, capsys):
    words = ["--facts", "5000", "--log", f"memory={log}", "--output", str(tmp_path / "out")]
    assert plot_facts.main(words) == 1
    assert "error: --facts is 5000: give 16 times a square number" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
