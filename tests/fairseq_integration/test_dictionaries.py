"""The share of <unk> is logged for data of fairseq's tasks and of this package's tasks."""

import logging

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, data_utils, indexed_dataset

from fairseq_plugins.segment_language_model.streams import load_tokens


@pytest.mark.parametrize("impl", ["mmap", "lazy"])
@pytest.mark.parametrize(("unknown", "level"), [(2, logging.WARNING), (1, logging.INFO)])
def test_more_than_one_percent_of_unknown_tokens_is_a_warning(
    tmp_path, caplog, impl, unknown, level
):
    caplog.set_level(logging.INFO)
    dictionary = Dictionary()
    dictionary.add_symbol("a")
    text = [dictionary.unk()] * unknown + [dictionary.index("a")] * (100 - unknown)
    for name in ("train", "train1"):
        builder = indexed_dataset.make_builder(f"{tmp_path / name}.bin", impl, vocab_size=5)
        builder.add_item(torch.tensor(text))
        builder.finalize(f"{tmp_path / name}.idx")
    tokens = load_tokens(str(tmp_path / "train"), dictionary, impl, combine=True)
    assert np.count_nonzero(tokens == dictionary.unk()) == 2 * unknown
    share = f"{unknown}.0 % of 100 tokens are <unk>"
    if impl == "mmap":
        data_utils.load_indexed_dataset(str(tmp_path / "train"), dictionary, impl, combine=True)
    found = [each for each in caplog.records if share in each.getMessage()]
    assert [each.levelno for each in found] == [level] * (4 if impl == "mmap" else 2)
    for name in ("train", "train1"):
        assert any(f"/{name}:" in each.getMessage() for each in found)
