"""WikiText-103, 103 million words of English Wikipedia articles, binarized for fairseq.

    python -m scripts.prepare.wikitext103 --output data/wikitext-103

The splits are the archive's files wiki.{train,valid,test}.tokens. Each line ends with </s>, and
an empty line is a lone </s>; the <unk> of the text is fairseq's <unk>.
"""

import sys

from scripts.prepare._published import WordDataSet, run

WIKITEXT103 = WordDataSet(
    name="WikiText-103",
    mirrors=("https://wikitext.smerity.com", "http://wikitext.smerity.com"),
    files={"wikitext-103-v1.zip": "md5:9ddaacaf6af0710eda8c456decff7832"},
    vocabulary=267_735,
    splits={f"wiki.{split}.tokens": split for split in ("train", "valid", "test")},
)

if __name__ == "__main__":
    sys.exit(run(WIKITEXT103, __doc__))
