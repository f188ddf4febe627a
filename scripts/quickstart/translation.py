"""Train a small Weighted Transformer to name numbers: what `make quickstart-translation` runs.

    python -m scripts.quickstart.translation [--output quickstart/translation]

The model translates sentences with two numbers in words from English to German, where a number is
one long word in another order. No number of the test part occurs in training.

Each step prints what it does and the shell command it runs, to be pasted at the repository root.
Ctrl-C is safe at any moment: the same command resumes from the last checkpoint.

OUTPUT/data                   the sentences, in data/text; binarized for fairseq in data/bin
OUTPUT/checkpoints            checkpoints; the log, with the branch weights, is train.log
OUTPUT/evaluation             translations of the test part and their scores
"""

import shlex
import sys
from pathlib import Path

from scripts._shared.commands import ROOT, python_command, short
from scripts.quickstart._steps import run, run_quickstart, train

CORPUS = shlex.split("--train 30000 --valid 500 --test 1000 --seed 1")
LANGUAGES = shlex.split("--source-lang en --target-lang de")
# A German number is one word, so its sentence can have a third as many words as the English one.
PREPARATION = shlex.split("--unit subwords --bpe-size 200 --max-ratio 4")
# No dropout, since training is so short. No loader process (--num-workers 0), since for so little
# data it would only keep the two cores from computing.
TRAINING = shlex.split("""
    --user-dir fairseq_plugins --distributed-world-size 1 --num-workers 0
    --arch weighted_transformer_tiny --dropout 0 --attention-dropout 0
    --criterion label_smoothed_cross_entropy --label-smoothing 0.1
    --optimizer adam_with_branch_weights --adam-betas 0.9,0.98 --clip-norm 1
    --lr 0.003 --lr-scheduler inverse_sqrt --warmup-updates 200 --max-update 1400
    --freeze-branch-weights-after 1200 --max-tokens 3000 --required-batch-size-multiple 1
    --save-interval-updates 200 --keep-interval-updates 1 --no-epoch-checkpoints --seed 1
    --log-format json --log-interval 50
""")


def quickstart(output: Path) -> None:
    """Run all steps; all but the last go on where they stopped."""
    data, checkpoints = short(output / "data"), output / "checkpoints"
    words = [*python_command("prepare"), "number_names", *CORPUS, *PREPARATION, "--output", data]
    run("corpus: sentences with two numbers, in subword units; no number is in two parts", words)
    checkpoints.mkdir(exist_ok=True)
    words = [f"{data}/bin", *LANGUAGES, *TRAINING, "--log-file", short(checkpoints / "train.log")]
    updates, seconds = train(words, checkpoints, "about 6 minutes of CPU time")
    words = [*python_command("evaluate.translation"), f"{data}/bin", *LANGUAGES, "--examples", "10"]
    words += ["--path", short(checkpoints / "checkpoint_last.pt")]
    words += ["--output", short(output / "evaluation")]
    run("evaluation: the test part, whose numbers were not in training", words)
    print(
        f"\n{updates} updates, {seconds:.0f} s of training\n"
        "how to use it, and the paper's models: see examples/weighted_transformer/README.md",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    folder = ROOT / "quickstart" / "translation"
    return run_quickstart(quickstart, __doc__, folder, "quickstart-translation", arguments)


if __name__ == "__main__":
    sys.exit(main())
