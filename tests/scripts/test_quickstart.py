"""Quickstarts: how they end, and the language model's figures."""

import math

import pytest

from scripts.quickstart import _steps as steps
from scripts.quickstart import language_model as quickstart


def test_an_interrupted_quickstart_says_how_it_goes_on(tmp_path, capsys):
    def interrupt(output):
        assert output.is_dir()
        raise KeyboardInterrupt

    words = ["--output", str(tmp_path / "a" / "b")]
    assert steps.run_quickstart(interrupt, "python -m scripts.some", tmp_path, "some", words) == 130
    assert "`make some` goes on from the last checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("test", "probabilities"),
    [
        # counts in training, with a newline before the text: 2 each of newline-a, a-b and b-newline
        ("ab\n", [3 / 5, 3 / 5, 3 / 5]),
        ("aa", [3 / 5, 1 / 5]),
        ("\nb", [1 / 5, 1 / 5]),
    ],
)
def test_bigram_bits_by_hand(test, probabilities):
    bits = -sum(map(math.log2, probabilities)) / len(test)
    assert quickstart.bigram_bits_per_character("ab\nab\n", test) == pytest.approx(bits, abs=1e-12)


def test_a_sample_is_decoded():
    log = (
        "INFO | fairseq_cli.interactive | NOTE\n"
        "S-0\tdef\n"
        "H-0\t-1.5\tdef \u2581f (): </s> \u2581\u2581 p </s>\n"
        "D-0\t-1.5\tnot this one\n"
    )
    assert quickstart.decode_sample(log) == "def f():\n  p\n"
