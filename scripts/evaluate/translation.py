r"""Translate a part of a text with a trained model and compute several scores for all of it.

    python -m scripts.evaluate.translation data/en-de/bin --source-lang en --target-lang de \
        --path checkpoints/checkpoint_best.pt --output evaluation -- --max-tokens 4096

Works for any translation model of fairseq or this plugin. fairseq-generate translates every
sentence, subword units are joined to words, and Moses detokenizes them. The text is compared with
the reference, a raw text with the same number of lines. The scores are sacreBLEU, the BLEU of Moses
tokens as in papers of 2017, and the share of translations that match exactly;
scripts/evaluate/_translation_scores.py says how each is computed.

Options after -- go to fairseq-generate; their paths are relative to the root of the repository.

OUTPUT/translation.txt    the translations as text, in the order of the part
OUTPUT/scores.json        scores with their signatures, number of sentences, command
"""

import argparse
import re
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from scripts._shared.checkpoints import read_checkpoint
from scripts._shared.command_line import command_parser, exit_status
from scripts._shared.commands import format_command, program, run_child, short
from scripts._shared.files import write_json, write_text
from scripts._shared.results import markdown_table
from scripts.prepare._lines import read_lines
from scripts.prepare._symbols import check_language

# values of --branch-weights, for a weighted_transformer
LEARNED = "learned"
BRANCH_WEIGHTS = (LEARNED, "random", "uniform")


def read_references(options: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the reference's file and lines; raise ValueError if it does not fit the part."""
    from fairseq.data.data_utils import load_indexed_dataset

    source, target, split = options.source_lang, options.target_lang, options.split
    # as `scripts.prepare translation` writes it
    beside = options.data.parent / "references" / f"{split}.{target}"
    path = options.reference or beside
    if not path.is_file():
        raise ValueError(
            f"--reference: there is no {short(path)}: name a file with the raw translations of "
            f"--split {split}, one sentence per line; `scripts.prepare translation` keeps those of "
            "test parts"
        )
    references = list(read_lines(path))
    # data binarized for the other direction will do
    pairs = f"{source}-{target}", f"{target}-{source}"
    parts = [load_indexed_dataset(f"{options.data}/{split}.{pair}.{source}") for pair in pairs]
    # fairseq-generate names a part that is missing
    sentences = next((len(part) for part in parts if part is not None), len(references))
    if len(references) != sentences:
        raise ValueError(
            f"--reference {short(path)} has {len(references):,} lines, --split {split} of "
            f"{short(options.data)} has {sentences:,} sentences: give the raw text that this part "
            "was made from; for a validation part, which was cleaned, only the pairs that were kept"
        )
    return path, references


def check_branch_weights(options: argparse.Namespace, extra: list[str]) -> None:
    """Refuse --branch-weights where it would have no effect."""
    if any(word.partition("=")[0] == "--model-overrides" for word in extra):
        raise ValueError(
            f"--branch-weights is {options.branch_weights} and --model-overrides is given too: "
            f"leave the first out, and add 'branch_weights': '{options.branch_weights}' to the "
            "second"
        )
    for path in options.path:
        weights = read_checkpoint(path, "--path").get("model") or ()
        if not any(name.endswith((".kappa", ".kappa_logits")) for name in weights):
            raise ValueError(
                f"--branch-weights is {options.branch_weights}, and --path {short(path)} holds a "
                "model without branches: leave it out, or name a weighted_transformer"
            )


def generate_command(options: argparse.Namespace, extra: list[str]) -> list[str]:
    """Return the command that translates; the options after ``extra`` make it skip no sentence."""
    words = [program("fairseq-generate"), short(options.data), "--user-dir", "fairseq_plugins"]
    words += ["--source-lang", options.source_lang, "--target-lang", options.target_lang]
    words += ["--beam", str(options.beam), "--lenpen", str(options.lenpen), "--remove-bpe"]
    # without a seed, random branch weights and sampling would differ each time
    words += ["--seed", "1", *(["--cpu"] if options.cpu else [])]
    if options.branch_weights != LEARNED:
        words += ["--model-overrides", repr({"branch_weights": options.branch_weights})]
    words += [*extra, "--path", ":".join(map(short, options.path))]
    # fairseq's default, 8, leaves up to 7 sentences out
    return [*words, "--gen-subset", options.split, "--required-batch-size-multiple", "1"]


def translate(words: list[str], split: str, expected: int) -> tuple[list[str], list[str]]:
    """Return the sources and translations of a whole part in its order, as tokens.

    Args:
        words: the command that translates, without --results-path.
        split: name of the part.
        expected: number of sentences in the part.
    """
    sources: dict[int, str] = {}
    translations: dict[int, str] = {}
    with TemporaryDirectory() as folder:
        run_child([*words, "--results-path", folder])
        # only a newline ends a line: tokens may contain carriage returns
        with open(f"{folder}/generate-{split}.txt", encoding="utf-8", newline="\n") as file:
            for line in file:
                if match := re.match(r"S-(\d+)\t(.*)", line):
                    sources[int(match[1])] = match[2]
                elif match := re.match(r"H-(\d+)\t[^\t]*\t(.*)", line):
                    # with --nbest, the best comes first
                    translations.setdefault(int(match[1]), match[2])
    if translations.keys() != set(range(expected)):
        raise ValueError(
            f"fairseq-generate gave {len(translations):,} translations of the {expected:,} "
            f"sentences of --split {split}, so the scores would cover only a part: leave out "
            "--skip-invalid-size-inputs-valid-test, which skips sentences that are too long, "
            "--quiet, and --distributed-world-size"
        )
    return [sources[n] for n in range(expected)], [translations[n] for n in range(expected)]


def detokenize(lines: list[str], language: str) -> list[str]:
    """Detokenize lines of Moses tokens."""
    from sacremoses import MosesDetokenizer

    detokenizer = MosesDetokenizer(lang=language)
    return [detokenizer.detokenize(line.split()) for line in lines]


def are_tokenized(lines: list[str]) -> bool:
    """Return whether most of the lines that end with a full stop have a blank before it."""
    ends = [line[-2:-1].isspace() for line in lines if line.endswith(".")]
    return 2 * sum(ends) > len(ends)


def format_scores(scores: dict[str, Any]) -> str:
    """Return the scores as a Markdown table, and the signature of sacreBLEU."""
    compounds = ", compounds split" if scores["tokenized"]["compounds_split"] else ""
    figures = {
        "sacreBLEU": scores["detokenized"]["score"],
        f"BLEU of Moses tokens{compounds}": scores["tokenized"]["score"],
        "exact matches, %": scores["exact"],
    }
    rows = [[name, f"{value:.2f}"] for name, value in figures.items()]
    signature = scores["detokenized"]["signature"]
    return f"{markdown_table(['', 'score'], rows)}\n\nsignature of sacreBLEU: {signature}"


def evaluate(options: argparse.Namespace, extra: list[str]) -> None:
    """Translate, score, write and print."""
    from scripts.evaluate._translation_scores import score

    target = options.target_lang
    check_language(target, "target-lang")
    if options.branch_weights != LEARNED:
        check_branch_weights(options, extra)
    reference, references = read_references(options)
    if are_tokenized(references):
        raise ValueError(f"{short(reference)} is tokenized: give the raw text (--reference)")
    words = generate_command(options, extra)
    print(f"$ {format_command(words)}\n", flush=True)
    # before the translation, which takes long
    options.output.mkdir(parents=True, exist_ok=True)
    sources, tokens = translate(words, options.split, len(references))
    translations = detokenize(tokens, target)
    scores = {
        "command": shlex.join(words),
        "reference": short(reference),
        "sentences": len(references),
        **score(translations, references, target),
    }
    write_text(options.output / "translation.txt", "".join(f"{line}\n" for line in translations))
    write_json(options.output / "scores.json", scores)
    shown = detokenize(sources[: options.examples], options.source_lang)
    for source, translation, wanted in zip(shown, translations, references, strict=False):
        print(f"source:      {source}\ntranslation: {translation}\nreference:   {wanted}\n")
    print(f"{len(references):,} sentences, {options.split} of {short(options.data)}\n")
    print(format_scores(scores))
    print(f"\nwritten to {short(options.output)}/translation.txt and scores.json")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line, without those of fairseq-generate."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add("data", type=Path, metavar="DATA_BIN", help="folder that fairseq-preprocess wrote")
    add("--path", required=True, metavar="FILE[:FILE]", help="checkpoint, or an ensemble of them")
    for side in ("source", "target"):
        add(f"--{side}-lang", required=True, metavar="CODE", help=f"{side} language, such as en")
    add("--split", default="test", metavar="PART", help="what to translate (%(default)s)")
    help_text = "raw translations, one sentence per line (references/PART.CODE beside DATA_BIN)"
    add("--reference", type=Path, metavar="FILE", help=help_text)
    add("--beam", type=int, default=4, metavar="N", help="width of the beam (%(default)s)")
    help_text = "divide a translation's score by its length to this power (%(default)s)"
    add("--lenpen", type=float, default=0.6, metavar="X", help=help_text)
    help_text = "branch weights of a weighted_transformer (%(default)s)"
    add("--branch-weights", choices=BRANCH_WEIGHTS, default=LEARNED, help=help_text)
    add("--examples", type=int, default=0, metavar="N", help="print the first N sentences")
    add("--cpu", action="store_true", help="use no GPU")
    output = Path("evaluation")
    add("--output", type=Path, default=output, metavar="DIR", help="folder (%(default)s)")
    options = parser.parse_args(arguments)
    options.path = [Path(path).resolve() for path in options.path.split(":")]
    options.data, options.output = options.data.resolve(), options.output.resolve()
    options.reference = options.reference and options.reference.resolve()
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    end = words.index("--") if "--" in words else len(words)
    options, extra = parse(words[:end]), words[end + 1 :]
    interrupted = "nothing is written, run the same command again"
    return exit_status(lambda: evaluate(options, extra), interrupted, options.output)


if __name__ == "__main__":
    sys.exit(main())
