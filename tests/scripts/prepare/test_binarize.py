"""Binarized texts and their index."""

import numpy as np
import pytest
from fairseq.data.indexed_dataset import MMapIndexedDataset

from scripts.prepare import _binarize
from tests.scripts.prepare.prepared import SPLITS, contents, write_files


@pytest.mark.filterwarnings("ignore:overflow")
def test_offsets_beyond_two_gibibytes_are_mended(tmp_path):
    def offsets():
        index = MMapIndexedDataset.Index(str(tmp_path / "train.idx"))
        return [int(index[item][0]) for item in range(len(index))]

    # offsets as fairseq-preprocess writes them with several workers
    with MMapIndexedDataset.Index.writer(str(tmp_path / "train.idx"), np.uint32) as index:
        index.write([np.int32(2**28)] * 4)
    (tmp_path / "train.bin").write_bytes(bytes(4))
    assert min(offsets()) < 0
    _binarize.rewrite_index(str(tmp_path / "train"))
    assert offsets() == [0, 2**30, 2**31, 3 * 2**30]


def test_two_workers_binarize_to_the_same_bytes_as_one(tmp_path):
    # lines of many lengths, and words of which some are as frequent as others
    text = "".join(" ".join(f"w{i * j % 13}" for j in range(i % 7)) + "\n" for i in range(60))
    write_files(tmp_path, dict.fromkeys(SPLITS, text) | {"test": "w1 w2 other\n\nw3\n"})
    texts = {split: tmp_path / split for split in SPLITS}
    sizes = [_binarize.preprocess(texts, tmp_path / f"by{n}", n) for n in (1, 2)]
    assert sizes[0] == sizes[1]
    assert sizes[0]["test"] == {"lines": 3, "tokens": 7, "unknown": 1}
    assert contents(tmp_path / "by1") == contents(tmp_path / "by2")
