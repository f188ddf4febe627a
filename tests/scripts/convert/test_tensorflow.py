"""TensorFlow's files: tensors and symbols are read, damage is refused, nothing is executed."""

import json
import pickle
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from fairseq_plugins.transformer_xl.model import PRESETS
from scripts._shared.commands import ROOT
from scripts.convert._options import ForeignVocabulary
from scripts.convert._tensorflow import read_bundle
from tests.scripts.convert.tensor_bundle import entry, field, table, write_bundle
from tests.scripts.evaluate.saved_models import UnsafePickle

WEIGHTS = {
    "model/a": torch.arange(6.0).view(2, 3),
    "model/a/kernel": torch.linspace(-1, 1, 5),
    "model/b": torch.ones(3, 1, dtype=torch.float64),
    "model/half": torch.full((2, 2), 0.5, dtype=torch.float16),
    "one": torch.tensor(7.0),
}
OPTIMIZER = {
    "beta1_power": torch.tensor(0.9),
    "scope/beta2_power": torch.tensor(0.99),
    "global_step": torch.tensor(1000),
    "model/a/Adam": torch.ones(2, 3),
    "model/a/Adam_1": torch.ones(2, 3),
}


def assert_not_read(path, file):
    message = f"^--checkpoint {path}: {file} is missing, cut short, changed or not TensorFlow's"
    with pytest.raises(ValueError, match=message):
        read_bundle(path)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("suffix", ["", ".index", ".meta", ".data-00000-of-00001"])
def test_tensors_are_read_without_the_optimizers(tmp_path, files, suffix):
    write_bundle(tmp_path / "model.ckpt-0", {**WEIGHTS, **OPTIMIZER}, files)
    tensors = read_bundle(tmp_path / f"model.ckpt-0{suffix}")
    assert tensors.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def changed(data, position):
    return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


@pytest.mark.parametrize("damage", [changed, lambda data, position: data[:position]])
@pytest.mark.parametrize("name", ["x.data-00000-of-00001", "x.index"])
def test_a_damaged_file_is_refused_wherever_it_is_damaged(tmp_path, damage, name):
    write_bundle(tmp_path / "x", WEIGHTS)
    file = tmp_path / name
    whole = file.read_bytes()
    for position in range(0, len(whole), 3):
        file.write_bytes(damage(whole, position))
        assert_not_read(tmp_path / "x", name)
    file.unlink()
    assert_not_read(tmp_path / "x", name)


HEADER = {b"": field(1, 2)}


@pytest.mark.parametrize(
    ("header", "file", "offset", "named"),
    [
        ({}, 0, 0, "x.index"),
        (HEADER, 2**63, 0, "x.data-9223372036854775808-of-00002"),
        (HEADER, 0, 2**63, "x.data-00000-of-00002"),
        (HEADER, b"../../file", 0, "x.index"),
    ],
)
def test_an_index_has_a_header_and_reaches_no_other_file(tmp_path, header, file, offset, named):
    (tmp_path / "x.data-00000-of-00002").write_bytes(b"abcd")
    rows = {**header, b"../up": entry(1, [1], file, offset, b"abcd")}
    (tmp_path / "x.index").write_bytes(table(rows))
    assert_not_read(tmp_path / "x", named)


# a pickle as Python 2 wrote it, in which text is bytes
PYTHON_2 = (
    b"\x80\x02c__main__\nCorpus\n)\x81}U\x05vocabcvocabulary\nVocab\n)\x81}"
    b"U\x07idx2sym](U\x05<eos>U\x02\xc3\xa9esbsb."
)


class Vocab:
    def __init__(self, symbols):
        self.counter = Counter(symbols)
        self.idx2sym = symbols
        self.sym2idx = OrderedDict((symbol, n) for n, symbol in enumerate(symbols))


class Corpus:
    def __init__(self, symbols):
        self.dataset, self.train, self.vocab = "wt103", np.arange(5), Vocab(symbols)


def test_symbols_are_read_from_cached_data_and_nothing_is_executed(tmp_path):
    cache = tmp_path / "cache.pkl"
    corpus = Corpus(["<eos>", "é"])
    corpus.vocab.special = [UnsafePickle(tmp_path / "executed")]
    for content in (PYTHON_2, *(pickle.dumps(corpus, protocol) for protocol in (0, 2, 5))):
        cache.write_bytes(content)
        assert ForeignVocabulary(cache).symbols == ["<eos>", "é"]
        assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("cached", "symbols"),
    [
        # <S>, the sentence end of One Billion Word, becomes the line end
        (["a", "<S>", "<UNK>", "</S>"], ["a", "<eos>", "<unk>", "</S>"]),
        (["<S>", "<eos>", "<UNK>"], ["<S>", "<eos>", "<unk>"]),
        # blanks within symbols are made visible, as scripts.prepare.lm1b does
        (["a\u00a0b"], ["a\u2423b"]),
    ],
)
def test_cached_symbols_are_renamed_as_in_prepared_text(tmp_path, cached, symbols):
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(Corpus(cached)))
    assert ForeignVocabulary(tmp_path / "cache.pkl").symbols == symbols


@pytest.mark.parametrize(
    "content",
    [
        *(pickle.dumps(other) for other in ({"vocab": 3}, Corpus([1]))),
        *(PYTHON_2[:length] for length in range(0, len(PYTHON_2), 20)),
        PYTHON_2.replace(b"\xc3", b"\xff"),
        b"<html>",
    ],
)
def test_other_files_are_no_cached_data(tmp_path, content):
    cache = tmp_path / "cache.pkl"
    cache.write_bytes(content)
    with pytest.raises(ValueError, match=f"^--vocab {cache} is damaged or not a cache.pkl"):
        ForeignVocabulary(cache)


@pytest.mark.parametrize(
    ("file", "name"),
    [("characters", "enwik8"), ("characters", "text8"), ("wt103", "wt103"), ("lm1b", "lm1b")],
)
def test_options_in_our_files_are_the_presets(file, name):
    path = ROOT / "examples" / "segment_language_model" / f"tensorflow_{file}.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    preset = PRESETS[f"transformer_xl_{name}_large"]
    names = {"n_layer": "decoder_layers", "n_head": "decoder_attention_heads"}
    names |= {"d_model": "decoder_embed_dim", "d_inner": "decoder_ffn_embed_dim"}
    names |= {"dropout": "dropout", "dropatt": "attention_dropout"}
    names["div_val"] = "adaptive_input_factor"
    for theirs, ours in names.items():
        assert config.get(theirs) == preset.get(ours), theirs
    assert ",".join(map(str, config["cutoffs"])) == preset.get("adaptive_input_cutoff", "")
