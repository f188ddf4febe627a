"""One Billion Word, 0.8 billion words of news in shuffled sentences, binarized for fairseq.

    python -m scripts.prepare.lm1b --output data/lm1b

The training part is the 99 training shards, validation is heldout shard 1, test is heldout shard 0.
Each sentence ends with </s>; words seen fewer than 3 times in training become <unk>. Only ASCII
whitespace separates words: other whitespace in a word, where fairseq would split it, is written as
U+2423. It needs 20 GB of disk, about 4 GB of memory, and more than an hour on few cores.
"""

import sys

from scripts.prepare._downloads import Archive
from scripts.prepare._words import Words, run

ARCHIVE = "1-billion-word-language-modeling-benchmark-r13output.tar.gz"
DIGEST = "sha256:01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"
SPLITS = {
    **{f"news.en-{shard:05}-of-00100": "train" for shard in range(1, 100)},
    "news.en.heldout-00001-of-00050": "valid",
    "news.en.heldout-00000-of-00050": "test",
}
LM1B = Words(
    archives=[Archive(f"www.statmt.org/lm-benchmark/{ARCHIVE}", list(SPLITS), DIGEST)],
    splits=SPLITS,
    vocabulary=793_471,
    # <S>, </S> and <UNK>
    unlisted=3,
    threshold=3,
    ascii_blanks=True,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return run(LM1B, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
