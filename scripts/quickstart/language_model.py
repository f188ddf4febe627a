"""Train, evaluate and sample a small model of Python source: what `make quickstart` runs.

    python -m scripts.quickstart.language_model [--output quickstart]

Each step prints what it does and the shell command it runs, to be pasted at the repository root.
Ctrl-C is safe at any moment: the same command resumes from the last checkpoint.

OUTPUT/data                   the text and its subword units; binarized for fairseq in data/bin
OUTPUT/checkpoints            checkpoints of the training; its log is OUTPUT/train.log
OUTPUT/page.html              a look inside the model, for the browser
OUTPUT/result.json            options, sizes, results and times
"""

import json
import lzma
import math
import re
import shlex
import sys
from pathlib import Path

from scripts._shared.commands import ROOT, child_process, program, python_command, short
from scripts._shared.files import write_json
from scripts._shared.machine import bf16_units
from scripts._shared.results import markdown_table
from scripts.prepare.python_source import MODEL
from scripts.quickstart._steps import (
    Training,
    announce,
    option,
    run_logged,
    run_quickstart,
    write_page,
)

DATA_OPTIONS = shlex.split("""
    --subwords 2048
""")
COMMON_OPTIONS = shlex.split("""
    --user-dir fairseq_plugins --task segment_language_modeling --distributed-world-size 1
""")
TRAINING_OPTIONS = shlex.split("""
    --arch transformer_xl --decoder-layers 3 --decoder-embed-dim 128 --decoder-attention-heads 2
    --decoder-ffn-embed-dim 512 --decoder-normalize-before --tokens-per-sample 128 --batch-size 8
    --optimizer adam --adam-betas 0.9,0.98 --clip-norm 1.0
    --lr 0.004 --lr-scheduler cosine --warmup-updates 100
    --keep-interval-updates 1 --no-epoch-checkpoints --seed 1
""")
FP32_OPTIONS = shlex.split("""
    --max-update 2500 --save-interval-updates 250
""")
# takes about as long on a CPU with bf16 units
BF16_OPTIONS = shlex.split("""
    --bf16 --max-update 4000 --save-interval-updates 400
""")
EVALUATION_OPTIONS = shlex.split("""
    --tokens-per-sample 128 --batch-size 4
""")
# Tokens of recurrence (mem_len) in evaluation; in training, as many as a segment has.
RECURRENCES = {"off": 0, "as in training": 128, "four times as long": 512}
SAMPLING_OPTIONS = shlex.split("""
    --beam 1 --nbest 1 --sampling --sampling-topp 0.9 --continue-past-eos
    --min-len 150 --max-len-b 150 --seed 1
""")
PROMPT = "def"
ASCII = 128
PARTS = ("train", "test")
UNIT = "bits a character"


def prepare(output: Path) -> None:
    """Prepare the corpus (step 1)."""
    words = [*python_command("prepare.python_source"), *DATA_OPTIONS]
    words += ["--output", short(output / "data")]
    announce("[1] corpus: the source files of Python's own standard library", words)
    with child_process(words):
        pass


def sizes(output: Path) -> dict[str, dict[str, int]]:
    """Return the sizes of each part; characters and tokens include line ends."""
    text = (output / "data" / "preparation.json").read_text(encoding="utf-8")
    return json.loads(text)["splits"]


def tokens_per_character(output: Path, split: str) -> float:
    """Return the tokens per character of a split."""
    size = sizes(output)[split]
    return size["tokens"] / size["characters"]


def training(output: Path) -> Training:
    """Return the training of step 2."""
    length = BF16_OPTIONS if bf16_units() else FP32_OPTIONS
    scales = tokens_per_character(output, "train"), tokens_per_character(output, "valid")
    return Training(output, [*COMMON_OPTIONS, *TRAINING_OPTIONS, *length], UNIT, scales)


def bigram_bits_per_character(train: str, test: str) -> float:
    """Return bits per character of a test text under an add-one bigram model of a training text.

    The first character is predicted from a newline.
    """
    import numpy as np

    def pairs(text: str) -> np.ndarray:
        codes = np.frombuffer(("\n" + text).encode("ascii"), dtype=np.uint8).astype(np.int64)
        counts = np.bincount(codes[:-1] * ASCII + codes[1:], minlength=ASCII * ASCII)
        return counts.reshape(ASCII, ASCII)

    counts = pairs(train)
    probabilities = (counts + 1) / (counts.sum(axis=1, keepdims=True) + len(set(train)))
    return float(-(pairs(test) * np.log2(probabilities)).sum() / len(test))


def xz_bits_per_character(text: str) -> float:
    """Return bits per character of a text compressed as by `xz -9`."""
    return 8 * len(lzma.compress(text.encode(), preset=9)) / len(text)


def parse_evaluation(log: str) -> tuple[float, int]:
    """Return the loss in bits per token and the evaluated tokens from fairseq-eval-lm's log."""
    loss = re.search(r"Loss \(base 2\): ([\d.]+)", log)[1]
    tokens = re.search(r"Evaluated ([\d,]+) tokens", log)[1]
    return float(loss), int(tokens.replace(",", ""))


def model_options(output: Path) -> list[str]:
    """Return the options that give fairseq the data and the trained model."""
    source = training(output)
    return [short(source.data), *COMMON_OPTIONS, "--path", short(source.checkpoint)]


def evaluate(output: Path) -> dict[str, float]:
    """Evaluate the test part (step 3); return bits per character by recurrence."""
    print("\n[3] evaluation: the test part, whole files that were not in training", flush=True)
    found = {}
    for name, tokens in RECURRENCES.items():
        words = [program("fairseq-eval-lm"), *model_options(output), "--gen-subset", "test"]
        words += [*EVALUATION_OPTIONS, "--model-overrides", f"{{'mem_len': {tokens}}}"]
        announce(f"recurrence {name}", words)
        log = output / f"evaluation_{tokens}.log"
        bits, scored = parse_evaluation(run_logged(words, log))
        found[name] = bits * tokens_per_character(output, "test")
        print(f"{bits} bits a token, {scored:,} tokens: {found[name]:.4f} {UNIT}", flush=True)
    return found


def report(output: Path, recurrences: dict[str, float]) -> None:
    """Print a table of results and write them to result.json (step 4)."""
    text = {part: (output / "data" / "text" / f"{part}.txt").read_text("ascii") for part in PARTS}
    source = training(output)
    updates, seconds = source.progress()
    tokens = (int(option(TRAINING_OPTIONS, f"--{x}")) for x in ("tokens-per-sample", "batch-size"))
    seen = updates * math.prod(tokens) / tokens_per_character(output, "train")
    known = f"{len(text['train']) / 1e6:.1f} million characters"
    read = f"{seen / 1e6:.1f} million characters, {seconds:.0f} s"
    rows = [
        ("add-one bigram", known, bigram_bits_per_character(text["train"], text["test"])),
        ("xz -9", "nothing: it reads the test part only", xz_bits_per_character(text["test"])),
        *((f"model, recurrence {name}", read, bits) for name, bits in recurrences.items()),
    ]
    print(f"\n[4] result: {UNIT} of the test part, lower is better\n")
    cells = [(name, f"{bits:.4f}", trained) for name, trained, bits in rows]
    print(markdown_table(["", UNIT, "trained on"], cells))
    result = {
        "bits_per_character": {name: bits for name, _, bits in rows},
        "updates": updates,
        "training_seconds": round(seconds, 1),
        "corpus": sizes(output),
        "training_options": source.options,
        "evaluation_options": [*COMMON_OPTIONS, *EVALUATION_OPTIONS],
    }
    write_json(output / "result.json", result)
    print(f"\nwritten to {short(output)}/result.json", flush=True)


def decode_sample(log: str) -> str:
    """Return the text of the first hypothesis in fairseq-interactive's output."""
    words = re.search(r"^H-0\t[^\t]*\t(.*)$", log, re.MULTILINE)[1].split(" ")
    text = "".join("\n" if piece == "</s>" else piece for piece in words)
    return text.replace("\u2581", " ")


def sample(output: Path) -> None:
    """Print text sampled from the model (step 5)."""
    words = [program("fairseq-interactive"), *model_options(output)]
    words += ["--bpe", "sentencepiece", "--sentencepiece-model", short(output / "data" / MODEL)]
    words += SAMPLING_OPTIONS
    announce(
        f"[5] sample: {PROMPT!r} and what the model writes after it",
        words,
        before=f"echo {shlex.quote(PROMPT)} | ",
    )
    log = run_logged(words, output / "sample.log", stdin_text=PROMPT + "\n")
    print(f"\n{decode_sample(log)}", flush=True)


def quickstart(output: Path) -> None:
    """Run all steps; skip those already done, except for evaluation and sampling."""
    prepare(output)
    training(output).run("[2] training: about 4 minutes on 2 cores")
    report(output, evaluate(output))
    sample(output)
    write_page(training(output), "[6] a look inside: what the model reads of the test part")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_quickstart(quickstart, __doc__, ROOT / "quickstart", "quickstart", arguments)


if __name__ == "__main__":
    sys.exit(main())
