"""Figures of the language model's quickstart."""

import json
import math

import pytest

from scripts.quickstart import language_model as quickstart
from scripts.quickstart._steps import option


@pytest.mark.parametrize(
    ("test", "probabilities"),
    [
        # training counts, a newline before the text: 2 of each of newline-a, a-b and b-newline
        ("ab\n", [3 / 5, 3 / 5, 3 / 5]),
        ("aa", [3 / 5, 1 / 5]),
        ("\nb", [1 / 5, 1 / 5]),
    ],
)
def test_bigram_bits_by_hand(test, probabilities):
    bits = -sum(map(math.log2, probabilities)) / len(test)
    assert quickstart.bigram_bits_per_character("ab\nab\n", test) == pytest.approx(bits, abs=1e-12)


def test_evaluation_with_each_recurrence(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    sizes = {split: {"characters": 12, "tokens": 3} for split in ("train", "valid", "test")}
    (tmp_path / "data" / "preparation.json").write_text(json.dumps({"splits": sizes}))
    ran = []

    def run_logged(words, log):
        ran.append(option(words, "--model-overrides"))
        bits = (8.0, 6.0, 2.0)[len(ran) - 1]
        return (
            "INFO | fairseq_cli.eval_lm | num. model params: 1,234\n"
            "INFO | fairseq_cli.eval_lm | Evaluated 3 tokens in 4.1s (7.9 tokens/s)\n"
            f"INFO | fairseq_cli.eval_lm | Loss (base 2): {bits}, Perplexity: 5.08\n"
        )

    monkeypatch.setattr(quickstart, "run_logged", run_logged)
    # 3 tokens for 12 characters
    expected = dict(zip(quickstart.RECURRENCES, (2.0, 1.5, 0.5), strict=True))
    assert quickstart.evaluate(tmp_path) == expected
    assert ran == [f"{{'mem_len': {tokens}}}" for tokens in quickstart.RECURRENCES.values()]


def test_a_sample_is_decoded():
    log = (
        "INFO | fairseq_cli.interactive | NOTE\n"
        "S-0\tdef\n"
        "H-0\t-1.5\tdef \u2581f (): </s> \u2581\u2581 p </s>\n"
        "D-0\t-1.5\tnot this one\n"
    )
    assert quickstart.decode_sample(log) == "def f():\n  p\n"
