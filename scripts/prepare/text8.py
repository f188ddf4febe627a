"""text8, 100 MB of English Wikipedia in 26 letters and the space, binarized for fairseq.

    python -m scripts.prepare.text8 --output data/text8

The first 90 million bytes train, the next 5 validate, the last 5 test. Symbols are the letters,
and _ for the space; the text has no newlines and the corpus no </s>.
"""

import sys

from scripts.prepare._published import ByteDataSet, run

TEXT8 = ByteDataSet(
    name="text8",
    mirrors=("https://mattmahoney.net/dc", "http://mattmahoney.net/dc"),
    files={"text8.zip": None},
    vocabulary=27,
    checksum="md5:3bea1919949baf155f99411df5fada7e",
    symbols={" ": "_"},
)

if __name__ == "__main__":
    sys.exit(run(TEXT8, __doc__))
