"""Random facts to memorize, generated and binarized for fairseq.

    python -m scripts.prepare.facts --facts 65536 --output DATA

A fact is a line of four symbols: two name the subject, one the relation, and one the object, which
is drawn from 256. There is one fact for each subject and relation. With N facts, the first three
symbols of a line have log2(N) bits, which cannot be predicted, and the object has 8 bits, which can
only be memorized. The training part, each fact once, is also the validation part.

OUTPUT/text/facts.txt     one fact per line
OUTPUT/bin                the same, binarized
OUTPUT/preparation.json   options and sizes
"""

import argparse
import math
import random
import sys
from pathlib import Path

from scripts._shared.command_line import exit_status
from scripts._shared.files import write_text
from scripts.prepare._binarize import preprocess, write_units
from scripts.prepare._stages import Stages, preparation_parser

RELATIONS, OBJECTS = 16, 256
SYMBOLS = 4


def names_per_position(facts: int) -> int:
    """Return the number of different symbols for each of the two names of a subject."""
    names = math.isqrt(max(0, facts) // RELATIONS)
    if names == 0 or RELATIONS * names**2 != facts:
        raise ValueError(
            f"--facts is {facts}: give 16 times a square number, such as 4096, 16384 or 65536"
        )
    return names


def draw_facts(facts: int, seed: int) -> list[str]:
    """Return the facts, drawn with a seed, in the order of subjects and relations."""
    names = names_per_position(facts)
    # only random() is guaranteed to draw the same in every version of Python
    draw = random.Random(f"{seed} facts")
    return [
        f"a{first} b{second} r{relation} o{int(draw.random() * OBJECTS)}"
        for first in range(names)
        for second in range(names)
        for relation in range(RELATIONS)
    ]


def write_texts(lines: list[str], folder: Path) -> None:
    """Write the facts, one a line."""
    write_text(folder / "facts.txt", "".join(f"{line}\n" for line in lines))


def binarize(text: Path, folder: Path) -> dict:
    """Write the fairseq data folder, where both parts are the text; return their sizes."""
    sizes = preprocess({"train": text, "valid": text}, folder, 1)
    write_units(folder, "words")
    return sizes


def prepare(options: argparse.Namespace) -> None:
    """Make the --output folder, unless it is complete already."""
    lines = draw_facts(options.facts, options.seed)
    stages = Stages(options.output, {"facts": options.facts, "seed": options.seed})
    stages.run("text", write_texts, lines)
    sizes = stages.run("bin", binarize, options.output / "text" / "facts.txt")
    stages.finish({"splits": sizes})


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = preparation_parser(__doc__)
    add = parser.add_argument
    add("--facts", type=int, required=True, metavar="N", help="16 times a square number")
    add("--seed", type=int, default=1, metavar="N", help="random seed (default: %(default)s)")
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
