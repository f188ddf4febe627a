import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts.quickstart import _steps as quickstart_steps
from scripts.quickstart import language_model as quickstart

EVALUATION_LOG = """\
2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | num. model params: 1,234
2026-01-01 00:00:09 | INFO | fairseq_cli.eval_lm | Evaluated 322,635 tokens in 4.1s (7.9 tokens/s)
2026-01-01 00:00:09 | INFO | fairseq_cli.eval_lm | Loss (base 2): 2.3456, Perplexity: 5.08
"""


def exactly(text):
    return f"^{re.escape(text)}$"


@pytest.mark.parametrize(
    ("test", "probabilities"),
    [
        # training counts, a newline before the text: 2 of each of newline-a, a-b and b-newline
        ("ab", [3 / 5, 3 / 5]),
        ("ab\n", [3 / 5, 3 / 5, 3 / 5]),
        ("aa", [3 / 5, 1 / 5]),
        ("\nb", [1 / 5, 1 / 5]),
    ],
)
def test_bigram_bits_by_hand(test, probabilities):
    bits = -sum(map(math.log2, probabilities)) / len(test)
    assert quickstart.bigram_bits_per_character("ab\nab\n", test) == pytest.approx(bits, abs=1e-12)


def test_bigram_probabilities_sum_to_one():
    train = "def f():\n    return 1\n"
    # the first character follows a newline
    total = sum(2 ** -quickstart.bigram_bits_per_character(train, char) for char in set(train))
    assert total == pytest.approx(1, abs=1e-12)


def test_bigram_refuses_unknown_characters():
    message = "test text: the characters ['b', 'c'] are not in the training text"
    with pytest.raises(ValueError, match=exactly(message)):
        quickstart.bigram_bits_per_character("a\n", "abc\n")


@pytest.mark.skipif(shutil.which("xz") is None, reason="there is no xz command to compare with")
def test_xz_bits_are_those_of_the_command():
    text = Path(quickstart.__file__).read_text(encoding="ascii")
    command = ["xz", "-9", "--threads=1", "--stdout"]
    compressed = subprocess.run(command, input=text.encode(), capture_output=True, check=True)
    assert quickstart.xz_bits_per_character(text) == 8 * len(compressed.stdout) / len(text)


def test_evaluation_is_parsed():
    assert quickstart.parse_evaluation(EVALUATION_LOG) == (2.3456, 322635)


@pytest.mark.parametrize("line", [1, 2])
def test_evaluation_without_result_is_refused(line):
    lines = EVALUATION_LOG.splitlines()
    message = (
        "fairseq-eval-lm printed no loss in base 2 or no number of tokens evaluated: "
        "use the fairseq version that this project pins"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        quickstart.parse_evaluation("\n".join(lines[:line] + lines[line + 1 :]))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder as it is when training has just ended."""
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "data" / "text" / "train.txt").write_text("abc\n" * 10)
    (tmp_path / "data" / "text" / "test.txt").write_text("ab\n" * 4)
    sizes = {"train": (40, 20), "valid": (8, 2), "test": (12, 3)}
    splits = {
        split: {"characters": characters, "tokens": tokens}
        for split, (characters, tokens) in sizes.items()
    }
    (tmp_path / "data" / "corpus.json").write_text(json.dumps({"splits": splits}))
    (tmp_path / "train.log").write_text(
        '| train_inner | {"epoch": 1, "num_updates": "50", "train_wall": "60"}\n'
        '| valid | {"epoch": 1, "valid_loss": "8.0", "valid_num_updates": "50"}\n'
        '| train_inner | {"epoch": 1, "num_updates": "100", "train_wall": "30"}\n'
        '| valid | {"epoch": 1, "valid_loss": "6.0", "valid_num_updates": "100"}\n'
    )
    monkeypatch.setattr(quickstart_steps.Training, "progress", lambda self: (100, 90.04))
    return tmp_path


def evaluation_log(bits, tokens):
    return EVALUATION_LOG.replace("2.3456", str(bits)).replace("322,635", str(tokens))


def test_evaluation_with_each_recurrence(folder, monkeypatch, capsys):
    found = []

    def run(words, log, description):
        found.append((words, log.name))
        return evaluation_log(8 - len(found), 3)

    monkeypatch.setattr(quickstart, "run_logged", run)
    names = list(quickstart.RECURRENCES)
    # 3 tokens for 12 characters
    assert quickstart.evaluate(folder) == {
        name: (7 - place) / 4 for place, name in enumerate(names)
    }
    for (words, log), tokens in zip(found, quickstart.RECURRENCES.values(), strict=True):
        assert quickstart_steps.option(words, "--model-overrides") == f"{{'mem_len': {tokens}}}"
        assert quickstart_steps.option(words, "--path").endswith("checkpoint_last.pt")
        assert log == f"evaluation_{tokens}.log"
    assert "7.0 bits a token, 3 tokens: 1.7500 bits a character\n" in capsys.readouterr().out


def test_evaluation_of_another_number_of_tokens_is_refused(folder, monkeypatch):
    monkeypatch.setattr(quickstart, "run_logged", lambda *_: evaluation_log(7, 2))
    message = (
        "fairseq-eval-lm scored 2 tokens and the test part has 3: the figure would be wrong, check "
        "EVALUATION_OPTIONS of scripts/quickstart/language_model.py"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        quickstart.evaluate(folder)


def test_the_result_is_printed_drawn_and_written(folder, capsys):
    quickstart.report(folder, {"off": 2.0, "as in training": 1.5})
    printed = capsys.readouterr().out
    result = json.loads((folder / "result.json").read_text())
    figures = result["bits_per_character"]
    assert list(figures) == [
        "add-one bigram",
        "xz -9",
        "model, recurrence off",
        "model, recurrence as in training",
    ]
    for name, bits in figures.items():
        assert re.search(rf"^\| {re.escape(name)} +\| +{bits:.4f} \|", printed, re.MULTILINE)
    # 2 tokens for 8 characters of the validation part
    assert result["validation"] == {"minutes": [1.0, 1.5], "bits_per_character": [2.0, 1.5]}
    assert (result["updates"], result["training_seconds"]) == (100, 90.0)
    # a token of the training part has 2 characters
    read = 2 * 100 * quickstart.tokens_per_update() / 1e6
    assert f" {read:.1f} million characters, 90 s |" in printed
    assert (folder / "quickstart.png").read_bytes().startswith(b"\x89PNG")


def test_sample_is_decoded():
    log = (
        "INFO | fairseq_cli.interactive | NOTE\n"
        "S-0\tdef\n"
        "H-0\t-1.5\tdef \u2581f (): </s> \u2581\u2581 p </s>\n"
        "D-0\t-1.5\tnot this one\n"
    )
    assert quickstart.decode_sample(log) == "def f():\n  p\n"


def test_sample_that_is_missing_is_refused():
    message = (
        "fairseq-interactive printed no hypothesis H-0: check PROMPT and SAMPLING_OPTIONS of "
        "scripts/quickstart/language_model.py"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        quickstart.decode_sample("S-0\td e f\n")


def test_the_prompt_reaches_the_command_as_it_is_shown(folder, monkeypatch, capsys):
    received = []

    def answer(words, log, description, sent):
        received.append((words, sent))
        return "H-0\t-1\tdef\n"

    monkeypatch.setattr(quickstart, "run_logged", answer)
    quickstart.sample(folder)
    ((words, sent),) = received
    assert sent == "def\n"
    shown = capsys.readouterr().out.split("$ echo def | ")[1].split("\n\n")[0]
    assert shlex.split(shown.replace("\\\n", "")) == words


@pytest.mark.parametrize(("units", "options"), [("AVX-512", "BF16_OPTIONS"), ("", "FP32_OPTIONS")])
def test_training_is_in_bf16_where_the_cpu_has_units_for_it(tmp_path, monkeypatch, units, options):
    monkeypatch.setattr(quickstart, "bf16_units", lambda: units)
    found = quickstart.training(tmp_path).options
    assert found[-len(getattr(quickstart, options)) :] == getattr(quickstart, options)
    assert ("--bf16" in found) == bool(units)
