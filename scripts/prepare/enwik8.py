"""enwik8, the first 100 MB of an English Wikipedia dump, binarized byte by byte for fairseq.

    python -m scripts.prepare.enwik8 --output data/enwik8 --newlines eos

The first 90 million bytes train, the next 5 validate, the last 5 test. Symbols are the decimal
values of the bytes. Newlines are removed (--newlines drop, as in the Transformer-XL code) or become
</s> (--newlines eos, as in the adaptive-span and all-attention code; a split that ends within a
line gets a final </s>, too). Bits per character of the two conventions are not comparable.
"""

import sys

from scripts.prepare._characters import Characters, run
from scripts.prepare._downloads import Archive

DIGEST = "md5:a1fa5ffddb56f4953e226637dabbb36a"
ENWIK8 = Characters(
    archives=[Archive("mattmahoney.net/dc/enwik8.zip", ["enwik8"], text_checksum=DIGEST)],
    vocabulary=205,
    has_newlines=True,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(ENWIK8, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
