"""WikiText-103, 103 million words of English Wikipedia articles, binarized for fairseq.

    python -m scripts.prepare.wikitext103 --output data/wikitext-103

The splits are the archive's files wiki.{train,valid,test}.tokens. Each line ends with </s>, and
an empty line is a lone </s>; the <unk> of the text is fairseq's <unk>.
"""

import sys

from scripts.prepare._downloads import Archive
from scripts.prepare._words import Words, run

ADDRESS = "wikitext.smerity.com/wikitext-103-v1.zip"
SPLITS = {f"wiki.{split}.tokens": split for split in ("train", "valid", "test")}
WIKITEXT103 = Words(
    archives=[Archive(ADDRESS, list(SPLITS), "md5:9ddaacaf6af0710eda8c456decff7832")],
    splits=SPLITS,
    vocabulary=267_735,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(WIKITEXT103, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
