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

import math
import random
import sys
from functools import partial
from pathlib import Path

from scripts._shared.command_line import command_parser, exit_status
from scripts.prepare._binarize import preprocess, write_units
from scripts.prepare._stages import Stages, add_output_option

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


def make(output: Path, facts: int, seed: int) -> None:
    """Make the data in the folder output, or do nothing if it is there."""
    lines = draw_facts(facts, seed)
    stages = Stages(output, {"facts": facts, "seed": seed})

    def write(folder: Path) -> None:
        text = "".join(f"{line}\n" for line in lines)
        (folder / "facts.txt").write_text(text, encoding="utf-8", newline="\n")

    def binarize(folder: Path) -> dict:
        text = output / "text" / "facts.txt"
        sizes = preprocess({"train": text, "valid": text}, folder, 1)
        write_units(folder, "words")
        return sizes

    stages.run("text", write)
    stages.finish({"splits": stages.run("bin", binarize)})


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    add_output_option(parser)
    add("--facts", type=int, required=True, metavar="N", help="16 times a square number")
    add("--seed", type=int, default=1, metavar="N", help="of the draws (default: %(default)s)")
    options = parser.parse_args(arguments)
    work = partial(make, options.output, options.facts, options.seed)
    return exit_status(work, output=options.output)


if __name__ == "__main__":
    sys.exit(main())
