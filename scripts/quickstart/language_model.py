"""Train, evaluate and sample a small model of Python source: what `make quickstart` runs.

    python -m scripts.quickstart.language_model [--output quickstart]

Each step prints what it does and the shell command it runs, to be pasted at the repository root.
Ctrl-C is safe at any moment: the same command resumes from the last checkpoint.

OUTPUT/data                   the text and its subword units; binarized for fairseq in data/bin
OUTPUT/checkpoints            checkpoints of the training
OUTPUT/result.json            bits per character of the test part
OUTPUT/page.html              a page that shows the model reading the test part
"""

import json
import lzma
import re
import shlex
import sys
from pathlib import Path

from scripts._shared.commands import ROOT, program, python_command, short
from scripts._shared.files import write_json
from scripts._shared.results import markdown_table
from scripts.quickstart._steps import run, run_quickstart, train

COMMON = shlex.split("""
    --user-dir fairseq_plugins --task segment_language_modeling --distributed-world-size 1
""")
TRAINING = shlex.split("""
    --arch transformer_xl --decoder-layers 3 --decoder-embed-dim 128 --decoder-attention-heads 2
    --decoder-ffn-embed-dim 512 --decoder-normalize-before --tokens-per-sample 128 --batch-size 8
    --optimizer adam --adam-betas 0.9,0.98 --clip-norm 1.0
    --lr 0.004 --lr-scheduler cosine --warmup-updates 100 --max-update 1500
    --save-interval-updates 300 --keep-interval-updates 1 --no-epoch-checkpoints --seed 1
    --log-format simple --log-interval 50
""")
TOKENS_AN_UPDATE = 128 * 8
EVALUATION = shlex.split("--gen-subset test --tokens-per-sample 128 --batch-size 4")
# Tokens of recurrence (mem_len) in evaluation; in training, as many as a segment has.
RECURRENCES = {"off": 0, "on": 128}
SAMPLING = shlex.split("""
    --bpe sentencepiece --beam 1 --nbest 1 --sampling --sampling-topp 0.9 --continue-past-eos
    --min-len 150 --max-len-b 150 --seed 1
""")
PROMPT = "def"
ASCII = 128


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


def decode_sample(log: str) -> str:
    """Return the text of the first hypothesis in fairseq-interactive's output."""
    words = re.search(r"^H-0\t[^\t]*\t(.*)$", log, re.MULTILINE)[1].split(" ")
    text = "".join("\n" if piece == "</s>" else piece for piece in words)
    return text.replace("\u2581", " ")


def quickstart(output: Path) -> None:
    """Run all steps; the first two go on where they stopped."""
    data, checkpoints = short(output / "data"), output / "checkpoints"
    words = [*python_command("prepare"), "python_source", "--output", data]
    run("corpus: the source files of Python's own standard library", words)
    sizes = json.loads((output / "data/preparation.json").read_text("utf-8"))["splits"]
    # characters and tokens include line ends
    tokens_per_character = {
        part: size["tokens"] / size["characters"] for part, size in sizes.items()
    }

    words = [f"{data}/bin", *COMMON, *TRAINING]
    updates, seconds = train(words, checkpoints, "about 2 minutes on 2 idle cores")
    checkpoint = short(checkpoints / "checkpoint_last.pt")
    model = [f"{data}/bin", *COMMON, "--path", checkpoint]

    texts = {part: (output / f"data/text/{part}.txt").read_text("ascii") for part in sizes}
    known, test = texts["train"], texts["test"]
    rows = [
        (
            "add-one bigram",
            bigram_bits_per_character(known, test),
            f"{len(known) / 1e6:.1f} million",
        ),
        ("xz -9", 8 * len(lzma.compress(test.encode(), preset=9)) / len(test), "none"),
    ]
    read = updates * TOKENS_AN_UPDATE / tokens_per_character["train"]
    for name, tokens in RECURRENCES.items():
        words = [program("fairseq-eval-lm"), *model, *EVALUATION]
        words += ["--model-overrides", f"{{'mem_len': {tokens}}}"]
        title = f"evaluation of the test part, recurrence {name}"
        log = run(title, words, output / f"evaluation_{tokens}.log")
        bits = float(re.search(r"Loss \(base 2\): ([\d.]+)", log)[1]) * tokens_per_character["test"]
        print(f"{bits:.4f} bits a character", flush=True)
        rows += [(f"model, recurrence {name}", bits, f"{read / 1e6:.1f} million")]
    print(f"\nresult after {updates:,} updates in {seconds:.0f} s, for the test part: whole files")
    print("that were not in training; lower is better\n")
    heads = ["", "bits a character", "characters of training"]
    print(markdown_table(heads, [(name, f"{bits:.4f}", text) for name, bits, text in rows]))
    figures = {name: bits for name, bits, _ in rows}
    result = {"bits_per_character": figures, "updates": updates, "corpus": sizes}
    write_json(output / "result.json", result)

    words = [program("fairseq-interactive"), *model, *SAMPLING]
    words += ["--sentencepiece-model", f"{data}/pieces/sentencepiece.model"]
    title = f"sample: {PROMPT!r} and what the model writes after it"
    print("\n" + decode_sample(run(title, words, output / "sample.log", f"{PROMPT}\n")), flush=True)

    words = [*python_command("inspect"), checkpoint, "--data", f"{data}/bin"]
    words += ["--output", short(output / "page.html")]
    run("page: how the model reads the first 2,000 tokens of the test part", words)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run_quickstart(quickstart, __doc__, ROOT / "quickstart", "quickstart", arguments)


if __name__ == "__main__":
    sys.exit(main())
