"""The index of binarized texts."""

import numpy as np
import pytest
from fairseq.data.indexed_dataset import MMapIndexedDataset

from scripts.prepare import _binarize


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
