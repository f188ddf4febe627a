"""Random facts to be learned by heart, made on the spot and binarized for fairseq.

    python -m scripts.prepare.facts --facts 65536 --output DATA

A fact is a line of four symbols: two name the subject, one the relation, one the object, which is
drawn from 256. There is one fact for each subject and relation. So of N facts the first three
symbols of a line take log2(N) bits, which nobody can know before, and the object 8, which can only
be learned by heart. The training part, each fact once, also validates.

OUTPUT/text/facts.txt     a fact a line
OUTPUT/bin                the same, binarized
OUTPUT/preparation.json   options and sizes
"""

import argparse
import math
import random
import sys
from pathlib import Path

from scripts._shared.files import write_text
from scripts.prepare._binarize import preprocess, write_units
from scripts.prepare._stages import Stages, run_preparation

RELATIONS, OBJECTS = 16, 256
SYMBOLS = 4


def names_of(facts: int) -> int:
    """How many symbols name a subject in each of its two places."""
    names = math.isqrt(max(0, facts) // RELATIONS)
    if names == 0 or RELATIONS * names**2 != facts:
        raise ValueError(
            f"--facts is {facts}: give 16 times a square number, such as 4096, 16384 or 65536"
        )
    return names


def draw_facts(facts: int, seed: int) -> list[str]:
    """The facts in the order of subjects and relations."""
    names = names_of(facts)
    # of the draws only random() is promised to be the same in every version of Python
    draw = random.Random(f"{seed} facts")
    return [
        f"a{first} b{second} r{relation} o{int(draw.random() * OBJECTS)}"
        for first in range(names)
        for second in range(names)
        for relation in range(RELATIONS)
    ]


def prepare(options: argparse.Namespace) -> None:
    """Make the folder of --output, or do nothing if it is there."""
    lines = draw_facts(options.facts, options.seed)
    stages = Stages(options.output, {"facts": options.facts, "seed": options.seed})

    def write(folder: Path) -> None:
        write_text(folder / "facts.txt", "".join(f"{line}\n" for line in lines))

    def binarize(folder: Path) -> dict:
        text = options.output / "text" / "facts.txt"
        sizes = preprocess({"train": text, "valid": text}, folder, 1)
        write_units(folder, "words")
        return sizes

    stages.run("text", write)
    stages.finish({"splits": stages.run("bin", binarize)})


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--facts", type=int, required=True, metavar="N", help="16 times a square number")
    add("--seed", type=int, default=1, metavar="N", help="of the draws (default: %(default)s)")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    return run_preparation(__doc__, add_options, prepare, arguments)


if __name__ == "__main__":
    sys.exit(main())
