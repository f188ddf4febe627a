"""Train a small Weighted Transformer to name numbers: what `make quickstart-translation` runs.

    python -m scripts.quickstart.translation [--output quickstart/translation]

The model translates sentences with two numbers in words from English to German, where a number is
one long word in another order. No number of the test part occurs in training.

Each step prints what it does and the shell command it runs, to be pasted at the repository root.
Ctrl-C is safe at any moment: the same command resumes from the last checkpoint.

OUTPUT/corpus, OUTPUT/data    the sentences; binarized for fairseq in data/bin
OUTPUT/checkpoints            checkpoints; the log, with the branch weights, is OUTPUT/train.log
OUTPUT/evaluation             translations of the test part and their scores
OUTPUT/page.html              a look inside the model, for the browser
OUTPUT/result.json            options, sizes, scores and times
"""

import json
import shlex
import sys
from pathlib import Path

from scripts._shared.commands import ROOT, child_process, python_command, short
from scripts._shared.files import write_json
from scripts.prepare._stages import SPLITS
from scripts.prepare.number_names import LANGUAGES
from scripts.quickstart._steps import (
    Training,
    announce,
    run_logged,
    run_quickstart,
    write_page,
)

SOURCE, TARGET = LANGUAGES
CORPUS_OPTIONS = shlex.split("""
    --train 30000 --valid 500 --test 1000 --seed 1
""")
# A German number is one word, so its sentence can have a third as many words as the English one.
PREPARATION_OPTIONS = shlex.split("""
    --bpe-size 200 --max-ratio 4
""")
COMMON_OPTIONS = shlex.split(f"""
    --user-dir fairseq_plugins --source-lang {SOURCE} --target-lang {TARGET}
""")
# No dropout, since training is so short. No loader process (--num-workers 0), since for so little
# data it would only keep the two cores from computing.
TRAINING_OPTIONS = shlex.split("""
    --distributed-world-size 1 --num-workers 0
    --arch weighted_transformer_tiny --dropout 0 --attention-dropout 0
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam_with_branch_weights --adam-betas 0.9,0.98 --clip-norm 1
    --lr 0.003 --lr-scheduler inverse_sqrt --warmup-updates 200 --max-update 1400
    --freeze-branch-weights-after 1200 --max-tokens 3000 --required-batch-size-multiple 1
    --save-interval-updates 200 --keep-interval-updates 1 --no-epoch-checkpoints --seed 1
""")
EXAMPLES = 10


def prepare(output: Path) -> None:
    """Make the corpus and binarize it (steps 1 and 2)."""
    corpus = short(output / "corpus")
    words = [*python_command("prepare.number_names"), *CORPUS_OPTIONS, "--output", corpus]
    announce("[1] corpus: sentences with two numbers; no number is in two parts", words)
    with child_process(words):
        pass
    words = [*python_command("prepare.translation"), "--source-lang", SOURCE]
    words += ["--target-lang", TARGET]
    for part in SPLITS:
        words += [f"--{part}", f"{corpus}/text/{part}"]
    words += [*PREPARATION_OPTIONS, "--output", short(output / "data")]
    announce("[2] preparation: subword units, shared by both languages", words)
    run_logged(words, output / "preparation.log")
    for part, sizes in parts(output).items():
        print(f"{part:5} {sizes['kept']:,} of {sizes['pairs']:,} pairs kept")
    print(f"log in {short(output)}/preparation.log")


def parts(output: Path) -> dict[str, dict]:
    """Return the sizes of each part that the preparation recorded."""
    text = (output / "data" / "preparation.json").read_text(encoding="utf-8")
    return json.loads(text)["parts"]


def training(output: Path) -> Training:
    """Return the training of step 3."""
    return Training(output, [*COMMON_OPTIONS, *TRAINING_OPTIONS])


def evaluate(output: Path) -> None:
    """Translate and score the test part (step 4); write the scores to result.json."""
    source = training(output)
    words = [*python_command("evaluate.translation"), short(source.data), "--source-lang", SOURCE]
    words += ["--target-lang", TARGET, "--path", short(source.checkpoint)]
    words += ["--examples", str(EXAMPLES), "--output", short(output / "evaluation")]
    announce("[4] evaluation: the test part, whose numbers were not in training", words)
    with child_process(words):
        pass
    scores = json.loads((output / "evaluation" / "scores.json").read_text(encoding="utf-8"))
    updates, trained = source.progress()
    result = {
        "bleu": scores["detokenized"]["score"],
        "exact": scores["exact"],
        "sentences": scores["sentences"],
        "updates": updates,
        "training_seconds": round(trained, 1),
        "pairs": {part: sizes["kept"] for part, sizes in parts(output).items()},
        "corpus_options": CORPUS_OPTIONS,
        "preparation_options": PREPARATION_OPTIONS,
        "training_options": source.options,
    }
    write_json(output / "result.json", result)
    print(
        f"\n{updates} updates, {trained:.0f} s of training: BLEU {result['bleu']:.2f}, "
        f"{result['exact']:.1f} % exact; written to {short(output)}/result.json\n"
        "\nhow to use it, and the paper's models: see examples/weighted_transformer/README.md",
        flush=True,
    )


def quickstart(output: Path) -> None:
    """Run all steps; skip those already done, except for the evaluation."""
    prepare(output)
    training(output).run("[3] training: about 4 minutes on 2 cores")
    evaluate(output)
    write_page(training(output), "[5] a look inside: what the model reads to translate")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    folder = ROOT / "quickstart" / "translation"
    return run_quickstart(quickstart, __doc__, folder, "quickstart-translation", arguments)


if __name__ == "__main__":
    sys.exit(main())
