"""Generated parallel texts of number names in English and German.

    python -m scripts.prepare.number_names --output quickstart/numbers

German writes a number as one word, with the ones before the tens: "twenty-one thousand, three
hundred and five" is "einundzwanzigtausenddreihundertfünf". Each short sentence has two numbers,
since BLEU counts sequences of four words; some sentences have another word order in German. Numbers
of 1 to 6 digits are drawn, each length as often as the others. Each number belongs to one part, so
no number of the validation or test part is in the training part.

OUTPUT/text/{train,valid,test}.{en,de}    one sentence per line, for scripts.prepare.translation
OUTPUT/preparation.json                   options
"""

import argparse
import hashlib
import random
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts._shared.command_line import check_at_least, exit_status
from scripts._shared.files import write_text
from scripts.prepare._lines import progress
from scripts.prepare._stages import SPLITS, Stages, preparation_parser

LANGUAGES = ("en", "de")
DIGITS = 6
SENTENCES = (
    ("from {small} to {large}", "von {small} bis {large}"),
    ("{small} comes before {large}", "vor {large} kommt {small}"),
    ("{large} is more than {small}", "{large} ist mehr als {small}"),
    ("because {small} is less than {large}", "weil {small} weniger als {large} ist"),
    ("add {small} to {large}", "zähle {small} zu {large} hinzu"),
    ("subtract {small} from {large}", "ziehe {small} von {large} ab"),
)
# One in this many numbers belongs to the validation part, and one to the test part.
SHARE = 20


def draw_part(number: int, seed: int) -> str:
    """Return the part that a number belongs to."""
    # by a hash: the part does not depend on which numbers are drawn before
    digest = hashlib.sha256(f"{seed} {number}".encode()).digest()
    return {0: "valid", 1: "test"}.get(int.from_bytes(digest[:8], "big") % SHARE, "train")


def numbers(part: str, seed: int) -> Iterator[int]:
    """Yield numbers of a part without end, each length as likely as another."""
    draw = random.Random(f"{seed} {part}")
    # only random() is guaranteed to draw the same in every version of Python
    while True:
        digits = 1 + int(draw.random() * DIGITS)
        number = int((1 + 9 * draw.random()) * 10 ** (digits - 1))
        if draw_part(number, seed) == part:
            yield number


@cache
def name(number: int, language: str) -> str:
    """Return the name of a number."""
    from num2words import num2words

    return num2words(number, lang=language)


def sentences(part: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield different sentences of a part in English and German."""
    drawn = numbers(part, seed)
    draw = random.Random(f"{seed} {part} sentences")
    seen = set()
    while len(seen) < count:
        small, large = sorted((next(drawn), next(drawn)))
        sentence = int(draw.random() * len(SENTENCES))
        if small == large or (sentence, small, large) in seen:
            continue
        seen.add((sentence, small, large))
        yield tuple(
            pattern.format(small=name(small, language), large=name(large, language))
            for pattern, language in zip(SENTENCES[sentence], LANGUAGES, strict=True)
        )


def write_texts(counts: dict[str, int], seed: int, folder: Path) -> None:
    """Write a number of sentences of each part in both languages."""
    for part, count in counts.items():
        drawn = sentences(part, count, seed)
        pairs = progress(drawn, total=count, desc=part, unit=" pairs")
        for language, lines in zip(LANGUAGES, zip(*pairs, strict=True), strict=True):
            write_text(folder / f"{part}.{language}", "".join(f"{line}\n" for line in lines))


def prepare(options: argparse.Namespace) -> None:
    """Make the --output folder, unless it is complete already."""
    counts = {part: getattr(options, part) for part in SPLITS}
    check_at_least(1, **counts)
    stages = Stages(options.output, {**counts, "seed": options.seed})
    stages.run("text", write_texts, counts, options.seed)
    stages.finish({})


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = preparation_parser(__doc__)
    add = parser.add_argument
    for part, count in zip(SPLITS, (30_000, 500, 1000), strict=True):
        text = f"sentences of the {part} part (default: %(default)s)"
        add(f"--{part}", type=int, default=count, metavar="N", help=text)
    add("--seed", type=int, default=1, metavar="N", help="random seed (default: %(default)s)")
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
