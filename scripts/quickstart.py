"""Train, evaluate and sample a small character model of Python source: what `make quickstart` runs.

    python scripts/quickstart.py [--output quickstart]

Each step prints what it does and the shell command it runs, to be pasted at the repository root.
Ctrl-C is safe at any moment: the same command goes on from the last checkpoint.
"""

import argparse
import json
import lzma
import os
import re
import shlex
import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from checkpoints import repair_checkpoints, training_progress
from prepare_python_source import SPACE, separate_characters
from run_command import ROOT, child_process, format_command, program, short

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


def option(options: list[str], name: str) -> str:
    """Value of an option in a list of command line words."""
    return options[options.index(name) + 1]


def write_atomically(path: Path, value: dict) -> None:
    """Write a JSON file that is never seen half-written."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def check_training_options(record: Path, checkpoint: Path) -> None:
    """Record the training options, so that training goes on with the same ones only.

    Raises ValueError when the checkpoint was trained with other options.
    """
    options = [*COMMON_OPTIONS, *TRAINING_OPTIONS]
    if checkpoint.exists() and record.exists():
        recorded = json.loads(record.read_text(encoding="utf-8"))["options"]
        if recorded != options:
            raise ValueError(
                f"{short(checkpoint)} was trained with other options than TRAINING_OPTIONS of "
                f"scripts/quickstart.py (see {short(record)}): remove "
                f"{short(checkpoint.parent)} or give another folder with --output"
            )
    write_atomically(record, {"options": options})


def announce(title: str, words: list[str], before: str = "") -> None:
    """Print what a step is for and the command that it runs."""
    print(f"\n{title}\n$ {before}{format_command(words)}", flush=True)


def run_logged(words: list[str], log: Path, description: str, sent: str = "") -> str:
    """Run a command with its output in a log, showing the time it takes, and return the output."""
    with (
        child_process(words, log) as child,
        tqdm(desc=description, bar_format="{desc}: {elapsed}", leave=False, disable=None) as clock,
    ):
        child.stdin.write(sent.encode())
        child.stdin.close()
        while child.poll() is None:
            clock.refresh()
            time.sleep(0.2)
    return log.read_text(encoding="utf-8")


def prepare(output: Path) -> None:
    """Step 1: the corpus."""
    words = [program(Path(sys.executable).name), "scripts/prepare_python_source.py"]
    words += ["--output", short(output / "data")]
    announce("[1] corpus: the characters of the Python standard library's own source files", words)
    with child_process(words):
        pass


def training_command(output: Path, terminal: bool) -> list[str]:
    """fairseq-train command, with log lines in place of a progress bar when not on a terminal."""
    words = [program("fairseq-train"), short(output / "data" / "bin")]
    words += [*COMMON_OPTIONS, *TRAINING_OPTIONS, "--save-dir", short(output / "checkpoints")]
    return words if terminal else [*words, "--log-format", "simple", "--log-interval", "50"]


def train(output: Path) -> None:
    """Step 2: training, from the last checkpoint if there is one."""
    folder = output / "checkpoints"
    checkpoint = folder / "checkpoint_last.pt"
    repair_checkpoints(folder)
    check_training_options(output / "training.json", checkpoint)
    updates, _ = training_progress(checkpoint)
    goal = int(option(TRAINING_OPTIONS, "--max-update"))
    if updates >= goal:
        print(f"\n[2] training: {updates} of {goal} updates done, nothing left to do", flush=True)
        return
    words = training_command(output, terminal=sys.stderr.isatty())
    announce(
        f"[2] training: about 3 minutes on 2 cores, {updates} of {goal} updates done; fairseq's "
        f"bar\n    counts a whole epoch, of which training takes the first {goal} updates",
        words,
    )
    with child_process(words):
        pass


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
            "scripts/quickstart.py"
        )


def model_options(output: Path) -> list[str]:
    """Options by which fairseq finds the data and the trained model."""
    checkpoint = output / "checkpoints" / "checkpoint_last.pt"
    return [short(output / "data" / "bin"), *COMMON_OPTIONS, "--path", short(checkpoint)]


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
    updates, seconds = training_progress(output / "checkpoints" / "checkpoint_last.pt")
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
    write_atomically(output / "result.json", result)
    print(f"written to {short(output)}/result.json")


def decode_sample(log: str) -> str:
    """Text of the first hypothesis in fairseq-interactive's output.

    Raises ValueError when there is none.
    """
    found = re.search(r"^H-0\t[^\t]*\t(.*)$", log, re.MULTILINE)
    if not found:
        raise ValueError(
            "fairseq-interactive printed no hypothesis H-0: check PROMPT and SAMPLING_OPTIONS of "
            "scripts/quickstart.py"
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
    """Run all the steps; those already done are passed over, evaluation and sampling repeated.

    Raises ValueError when output cannot be written.
    """
    try:
        (output / "checkpoints").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output {short(output)} cannot be written ({error.strerror}): "
            "give a folder in a place where you may write"
        ) from error
    prepare(output)
    train(output)
    compare(output, evaluate(output))
    sample(output)


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "quickstart", help="working folder (quickstart)"
    )
    try:
        quickstart(parser.parse_args(arguments).output.resolve())
    except KeyboardInterrupt:
        print(
            "\ninterrupted (a traceback above is fairseq's way to stop); "
            "`make quickstart` goes on from the last checkpoint"
        )
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
