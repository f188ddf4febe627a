"""enwik8, the first 100 MB of an English Wikipedia dump, binarized byte by byte for fairseq.

    python -m scripts.prepare.enwik8 --output data/enwik8 --newlines eos

The first 90 million bytes train, the next 5 validate, the last 5 test. Symbols are the decimal
values of the bytes. The newline is left away (--newlines drop, as the Transformer-XL code does) or
is </s> (--newlines eos, as the adaptive-span and all-attention code does; a split that ends within
a line gets a last </s> there too). Bits per character of the two conventions do not compare.
"""

import sys
from dataclasses import replace

from scripts.prepare._characters import CharacterDataSet, binarize_characters, check_newlines
from scripts.prepare._checksums import Checksum
from scripts.prepare._corpus import Request, argument_parser, prepare, run

ENWIK8 = CharacterDataSet(
    name="enwik8",
    mirrors=("https://mattmahoney.net/dc", "http://mattmahoney.net/dc"),
    files=("enwik8.zip",),
    checksums={"enwik8": Checksum("md5", "a1fa5ffddb56f4953e226637dabbb36a")},
    vocabulary=205,
    disk_bytes=300_000_000,
    recipe="transformer_xl/enwik8_base",
    member="enwik8",
    sizes={"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000},
    symbol=str,
)


def main() -> int:
    """Command line of the script; returns its exit status."""
    parser = argument_parser(__doc__, "enwik8.zip or the file enwik8 in it")
    parser.add_argument(
        "--newlines",
        metavar="{drop,eos}",
        help="required: leave newlines away, or make each one </s>",
    )
    arguments = parser.parse_args()

    def work(request: Request) -> None:
        newlines = check_newlines(arguments.newlines)
        recipe = {"drop": ENWIK8.recipe, "eos": "all_attention/enwik8_small"}[newlines]
        prepare(
            replace(ENWIK8, recipe=recipe),
            request,
            lambda source, folder: binarize_characters(ENWIK8, source, folder, request, newlines),
            newlines=newlines,
        )

    return run(arguments, work)


if __name__ == "__main__":
    sys.exit(main())
