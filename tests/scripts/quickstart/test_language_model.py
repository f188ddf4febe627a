import json
import math
import re
import shlex
import shutil
import subprocess
from contextlib import contextmanager
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


@pytest.fixture
def ran(monkeypatch):
    """Commands that the driver would have run."""
    commands = []

    @contextmanager
    def pretend(words, log=None):
        commands.append(words)
        yield

    monkeypatch.setattr(quickstart_steps, "child_process", pretend)
    return commands


def test_training_command(tmp_path, ran, capsys):
    quickstart.train(tmp_path)
    options = [*quickstart.COMMON_OPTIONS, *quickstart.TRAINING_OPTIONS]
    expected = [f"{tmp_path}/data/bin", *options, "--save-dir", f"{tmp_path}/checkpoints"]
    # a test's standard error is no terminal
    assert ran[0][1:] == [*expected, "--log-format", "simple", "--log-interval", "50"]
    assert Path(ran[0][0]).name == "fairseq-train"
    assert quickstart.training(tmp_path).command(terminal=True)[1:] == expected
    printed = capsys.readouterr().out
    assert shlex.split(printed[printed.index("$ ") + 2 :].replace("\\\n", "")) == ran[0]


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
def evaluated(tmp_path, monkeypatch):
    """A working folder as it is when fairseq-eval-lm has just ended."""
    (tmp_path / "data" / "text").mkdir(parents=True)
    (tmp_path / "data" / "text" / "train.txt").write_text("abc\n" * 10)
    (tmp_path / "data" / "text" / "test.txt").write_text("a" * 322634 + "\n")
    (tmp_path / "data" / "corpus.json").write_text('{"python": "3.11.0"}')
    monkeypatch.setattr(quickstart, "run_logged", lambda *arguments: EVALUATION_LOG)
    monkeypatch.setattr(quickstart, "training_progress", lambda path: (1500, 170.04))
    return tmp_path


def test_evaluation_of_each_character(evaluated):
    result = quickstart.evaluate(evaluated)
    assert (result["bits"], result["tokens"]) == (2.3456, 322635)


def test_evaluation_of_another_number_of_tokens_is_refused(evaluated):
    (evaluated / "data" / "text" / "test.txt").write_text("a" * 322635 + "\n")
    message = (
        "fairseq-eval-lm evaluated 322635 tokens, test.txt has 322636 characters: the loss is not "
        "in bits per character of test.txt, check EVALUATION_OPTIONS of "
        "scripts/quickstart/language_model.py"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        quickstart.evaluate(evaluated)


def test_comparison_is_printed_and_written(evaluated, capsys):
    quickstart.compare(evaluated, {"bits": 2.3456, "tokens": 322635, "seconds": 4.1})
    printed = capsys.readouterr().out
    result = json.loads((evaluated / "result.json").read_text())
    assert list(result["bits_per_character"]) == [
        "bigram, add-one",
        "xz -9",
        quickstart.option(quickstart.TRAINING_OPTIONS, "--arch"),
    ]
    for name, bits in result["bits_per_character"].items():
        assert re.search(rf"^  {re.escape(name)} +{bits:.4f}$", printed, re.MULTILINE)
    assert list(result["bits_per_character"].values())[2] == 2.3456
    assert (result["tokens"], result["updates"]) == (322635, 1500)
    assert (result["training_seconds"], result["evaluation_seconds"]) == (170.0, 4.1)
    assert result["corpus"] == {"python": "3.11.0"}
    assert (
        "xz sees only the test text; the bigram model and the network have seen the training text"
        " (40 characters)." in printed
    )


def test_sample_is_decoded():
    log = (
        "INFO | fairseq_cli.interactive | NOTE\n"
        "S-0\td e f \u2581\n"
        "H-0\t-1.5\td e f \u2581 f ( ) : </s> \u2581 \u2581 p </s>\n"
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


def test_prompt_reaches_the_command_as_symbols(tmp_path, monkeypatch, capsys):
    received = []

    def answer(words, log, description, sent):
        received.append(sent)
        return "H-0\t-1\td e f\n"

    monkeypatch.setattr(quickstart, "run_logged", answer)
    quickstart.sample(tmp_path)
    assert received == ["d e f \u2581\n"]
    assert "\n$ echo 'd e f \u2581' | " in capsys.readouterr().out
