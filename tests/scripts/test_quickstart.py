"""The language model's quickstart: its figures and its sample."""

import math

import pytest

from scripts.quickstart import language_model as quickstart


def test_bigram_bits_by_hand():
    # counts in training, with a newline before the text: 2 each of newline-a, a-b and b-newline
    for test, probabilities in {
        "ab\n": [3 / 5] * 3,
        "aa": [3 / 5, 1 / 5],
        "\nb": [1 / 5] * 2,
    }.items():
        bits = -sum(map(math.log2, probabilities)) / len(test)
        assert quickstart.bigram_bits_per_character("ab\nab\n", test) == pytest.approx(bits)


def test_a_sample_is_decoded():
    log = (
        "INFO | fairseq_cli.interactive | NOTE\n"
        "S-0\tdef\n"
        "H-0\t-1.5\tdef \u2581f (): </s> \u2581\u2581 p </s>\n"
        "D-0\t-1.5\tnot this one\n"
    )
    assert quickstart.decode_sample(log) == "def f():\n  p\n"
