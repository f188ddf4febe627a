"""Train, evaluate and sample a small character model of Python source: what `make quickstart` runs.

    python -m scripts.quickstart.language_model [--output quickstart]

Each step prints what it does and the shell command it runs, to be pasted at the repository root.
Ctrl-C is safe at any moment: the same command goes on from the last checkpoint.
"""

import json
import lzma
import re
import shlex
import sys
import time
from pathlib import Path

import numpy as np

from scripts._shared.commands import ROOT, child_process, program, python_command, short
from scripts._shared.files import write_json
from scripts.prepare.python_source import SPACE, separate_characters
from scripts.quickstart._checkpoints import training_progress
from scripts.quickstart._steps import (
    Training,
    announce,
    option,
    run_logged,
    run_quickstart,
)

COMMON_OPTIONS = shlex.split("""
    --user-dir fairseq_plugins --task segment_language_modeling --distributed-world-size 1
""")
TRAINING_OPTIONS = shlex.split("""
    --arch all_attention_lm_tiny --tokens-per-sample 128 --batch-size 8
    --optimizer adam --adam-betas 0.9,0.98 --clip-norm 0.25
    --lr 0.004 --lr-scheduler cosine --warmup-updates 100 --max-update 2600
    --save-interval-updates 325 --keep-interval-updates 1 --no-epoch-checkpoints --seed 1
""")
EVALUATION_OPTIONS = shlex.split("""
    --tokens-per-sample 512 --batch-size 1
""")
SAMPLING_OPTIONS = shlex.split("""
    --beam 1 --nbest 1 --sampling --sampling-topp 0.9 --continue-past-eos
    --min-len 400 --max-len-b 400 --seed 1
""")
PROMPT = "def "
ASCII = 128


def prepare(output: Path) -> None:
    """Step 1: the corpus."""
    words = [*python_command("prepare.python_source"), "--output", short(output / "data")]
    announce("[1] corpus: the characters of the Python standard library's own source files", words)
    with child_process(words):
        pass


def training(output: Path) -> Training:
    """The training of step 2."""
    options = [*COMMON_OPTIONS, *TRAINING_OPTIONS]
    return Training(f"quickstart/{Path(__file__).name}", output, output / "data" / "bin", options)


def train(output: Path) -> None:
    """Step 2: training, from the last checkpoint if there is one."""
    training(output).run(
        2,
        "about 3 minutes on 2 cores",
        "counts a whole epoch, of which training takes the first {goal} updates",
    )


def bigram_bits_per_character(train: str, test: str) -> float:
    """Bits per character of a text under an add-one bigram model of the training text.

    The first character follows a newline. Raises ValueError for characters unknown in training.
    """
    unknown = sorted(set(test) - set(train))
    if unknown:
        raise ValueError(f"test text: the characters {unknown} are not in the training text")

    def pairs(text: str) -> np.ndarray:
        codes = np.frombuffer(("\n" + text).encode("ascii"), dtype=np.uint8).astype(np.int64)
        counts = np.bincount(codes[:-1] * ASCII + codes[1:], minlength=ASCII * ASCII)
        return counts.reshape(ASCII, ASCII)

    counts = pairs(train)
    probabilities = (counts + 1) / (counts.sum(axis=1, keepdims=True) + len(set(train)))
    return float(-(pairs(test) * np.log2(probabilities)).sum() / len(test))


def xz_bits_per_character(text: str) -> float:
    """Bits per character of a text compressed by itself as `xz -9` does."""
    return 8 * len(lzma.compress(text.encode(), preset=9)) / len(text)


def parse_evaluation(log: str) -> tuple[float, int]:
    """Loss in bits per token and number of tokens evaluated, from fairseq-eval-lm's log.

    Raises ValueError when the log has no such lines.
    """
    loss = re.search(r"Loss \(base 2\): ([\d.]+)", log)
    tokens = re.search(r"Evaluated ([\d,]+) tokens", log)
    if not loss or not tokens:
        raise ValueError(
            "fairseq-eval-lm printed no loss in base 2 or no number of tokens evaluated: "
            "use the fairseq version that this project pins"
        )
    return float(loss[1]), int(tokens[1].replace(",", ""))


def check_tokens(tokens: int, characters: int) -> None:
    """Check that each character was evaluated once.

    Raises ValueError when bits per token are not bits per character.
    """
    if tokens != characters:
        raise ValueError(
            f"fairseq-eval-lm evaluated {tokens} tokens, test.txt has {characters} characters: "
            "the loss is not in bits per character of test.txt, check EVALUATION_OPTIONS of "
            "scripts/quickstart/language_model.py"
        )


def model_options(output: Path) -> list[str]:
    """Options by which fairseq finds the data and the trained model."""
    source = training(output)
    return [short(source.data), *COMMON_OPTIONS, "--path", short(source.checkpoint)]


def evaluate(output: Path) -> dict:
    """Step 3: the model's loss on the test part."""
    words = [program("fairseq-eval-lm"), *model_options(output), "--gen-subset", "test"]
    words += EVALUATION_OPTIONS
    announce("[3] evaluation: the loss on the test part, whole files never trained on", words)
    started = time.monotonic()
    log = run_logged(words, output / "evaluation.log", "evaluation")
    seconds = time.monotonic() - started
    bits, tokens = parse_evaluation(log)
    check_tokens(tokens, len((output / "data" / "text" / "test.txt").read_text(encoding="ascii")))
    print(f"loss {bits} bits per token, {tokens:,} tokens; log in {short(output)}/evaluation.log")
    return {"bits": bits, "tokens": tokens, "seconds": round(seconds, 1)}


def compare(output: Path, evaluation: dict) -> None:
    """Step 4: a table of bits per character, also written to result.json."""
    print("\n[4] comparison: bits per character of the test part, fewer are better\n")
    data = output / "data"
    train, test = ((data / "text" / f"{name}.txt").read_text("ascii") for name in ("train", "test"))
    updates, seconds = training_progress(training(output).checkpoint)
    bits = {
        "bigram, add-one": bigram_bits_per_character(train, test),
        "xz -9": xz_bits_per_character(test),
        option(TRAINING_OPTIONS, "--arch"): evaluation["bits"],
    }
    for name, value in bits.items():
        print(f"  {name:24} {value:7.4f}")
    print(
        "\nxz sees only the test text; the bigram model and the network have seen the training text"
        f" ({len(train):,} characters)."
    )
    result = {
        "bits_per_character": bits,
        "tokens": evaluation["tokens"],
        "updates": updates,
        "training_seconds": round(seconds, 1),
        "evaluation_seconds": evaluation["seconds"],
        "corpus": json.loads((data / "corpus.json").read_text(encoding="ascii")),
        "training_options": [*COMMON_OPTIONS, *TRAINING_OPTIONS],
        "evaluation_options": [*COMMON_OPTIONS, *EVALUATION_OPTIONS],
    }
    write_json(output / "result.json", result)
    print(f"written to {short(output)}/result.json")


def decode_sample(log: str) -> str:
    """Text of the first hypothesis in fairseq-interactive's output.

    Raises ValueError when there is none.
    """
    found = re.search(r"^H-0\t[^\t]*\t(.*)$", log, re.MULTILINE)
    if not found:
        raise ValueError(
            "fairseq-interactive printed no hypothesis H-0: check PROMPT and SAMPLING_OPTIONS of "
            "scripts/quickstart/language_model.py"
        )
    characters = {SPACE: " ", "</s>": "\n"}
    return "".join(characters.get(symbol, symbol) for symbol in found[1].split())


def sample(output: Path) -> None:
    """Step 5: text sampled from the model."""
    words = [program("fairseq-interactive"), *model_options(output), *SAMPLING_OPTIONS]
    prompt = separate_characters(PROMPT)
    length = option(SAMPLING_OPTIONS, "--max-len-b")
    announce(
        f"[5] sample: {length} characters, {PROMPT!r} and what the model writes after it",
        words,
        before=f"echo {shlex.quote(prompt)} | ",
    )
    log = run_logged(words, output / "sample.log", "sampling", sent=prompt + "\n")
    print(f"\n{decode_sample(log)}\n\nlog in {short(output)}/sample.log")


def quickstart(output: Path) -> None:
    """Run all the steps; those already done are passed over, evaluation and sampling repeated."""
    prepare(output)
    train(output)
    compare(output, evaluate(output))
    sample(output)


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    return run_quickstart(quickstart, __doc__, ROOT / "quickstart", "quickstart", arguments)


if __name__ == "__main__":
    sys.exit(main())
