"""text8, 100 MB of English Wikipedia in 26 letters and the space, binarized for fairseq.

    python -m scripts.prepare.text8 --output data/text8

The first 90 million bytes train, the next 5 validate, the last 5 test. Symbols are the letters,
and _ for the space; the text has no newlines and the corpus no </s>.
"""

import sys

from scripts.prepare._characters import Characters, run
from scripts.prepare._downloads import Archive

DIGEST = "md5:3bea1919949baf155f99411df5fada7e"
TEXT8 = Characters(
    archives=[Archive("mattmahoney.net/dc/text8.zip", ["text8"], text_checksum=DIGEST)],
    vocabulary=27,
    symbols={" ": "_"},
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(TEXT8, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
