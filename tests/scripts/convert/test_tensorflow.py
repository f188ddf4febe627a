"""TensorFlow's files: tensors and symbols are read, damage is refused, nothing is executed."""

import json
import pickle
import re
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
NO_INDEX = "x.index is cut short, changed or not an index of TensorFlow's: "


@pytest.fixture
def path(tmp_path):
    write_bundle(tmp_path / "x", {**WEIGHTS, **OPTIMIZER})
    return tmp_path / "x"


def refused(path):
    """Return the error message for a refused checkpoint, without the option that names it."""
    label = f"--checkpoint {path}: "
    with pytest.raises(ValueError, match=f"^{re.escape(label)}") as error:
        read_bundle(path)
    return str(error.value).removeprefix(label)


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
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.data-00000-of-00001", "x.data-00000-of-00001 is cut short or changed at "),
        ("x.index", NO_INDEX),
    ],
)
def test_a_damaged_file_is_refused_wherever_it_is_damaged(path, damage, name, message):
    file = path.with_name(name)
    whole = file.read_bytes()
    for position in range(0, len(whole), 3):
        file.write_bytes(damage(whole, position))
        assert refused(path).startswith(message)


@pytest.mark.parametrize(
    "index",
    [
        # another file; another byte order; no header; a compressed block
        b"hello world",
        table({b"": field(1, 1) + field(2, 1), b"a": entry(1, [1], 0, 0, b"abcd")}),
        table({b"a": entry(1, [1], 0, 0, b"abcd")}),
        table({b"": field(1, 1)}, compression=1),
    ],
)
def test_an_index_in_another_format_is_refused(path, index):
    path.with_name("x.index").write_bytes(index)
    assert refused(path).startswith(NO_INDEX)


def test_missing_files_are_named(tmp_path):
    write_bundle(tmp_path / "x", WEIGHTS, files=3)
    for number in (0, 2):
        (tmp_path / f"x.data-0000{number}-of-00003").unlink()
    names = "x.data-00000-of-00003, x.data-00002-of-00003"
    assert refused(tmp_path / "x").startswith(f"there is no {names}: ")
    (tmp_path / "x.index").unlink()
    assert refused(tmp_path / "x").startswith("there is no x.index: ")


@pytest.mark.parametrize(
    ("file", "offset", "message"),
    [
        (2**63, 0, "there is no x.data-9223372036854775808-of-00002"),
        (0, 2**63, "x.data-00000-of-00002"),
        (b"../../file", 0, "x.index"),
    ],
)
def test_an_index_reaches_no_other_file(tmp_path, file, offset, message):
    (tmp_path / "x.data-00000-of-00002").write_bytes(b"abcd")
    rows = {b"": field(1, 2), b"../up": entry(1, [1], file, offset, b"abcd")}
    (tmp_path / "x.index").write_bytes(table(rows))
    assert refused(tmp_path / "x").startswith(message)


@pytest.mark.parametrize(
    ("kind", "shape", "data"),
    [
        (9, [1], bytes(8)),  # integers
        (1, [2], bytes(4)),  # fewer numbers than the shape has
    ],
)
def test_other_tensors_come_without_values(tmp_path, kind, shape, data):
    rows = {b"": field(1, 1), b"odd": entry(kind, shape, 0, 0, data)}
    (tmp_path / "x.index").write_bytes(table(rows))
    (tmp_path / "x.data-00000-of-00001").write_bytes(data)
    assert read_bundle(tmp_path / "x")["odd"].is_meta


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


@pytest.mark.parametrize("protocol", [0, 2, 5, None])
def test_symbols_are_read_from_cached_data(tmp_path, protocol):
    cache = tmp_path / "cache.pkl"
    corpus = Corpus(["<eos>", "é"])
    # calls in the pickle are not executed
    corpus.vocab.special = [UnsafePickle(tmp_path / "executed")]
    cache.write_bytes(PYTHON_2 if protocol is None else pickle.dumps(corpus, protocol=protocol))
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
        *(pickle.dumps(other) for other in (3, {"vocab": 3}, Vocab(["a"]), Corpus([1]))),
        *(PYTHON_2[:length] for length in range(0, len(PYTHON_2), 7)),
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
    for theirs, ours in {
        "n_layer": "decoder_layers",
        "n_head": "decoder_attention_heads",
        "d_model": "decoder_embed_dim",
        "d_inner": "decoder_ffn_embed_dim",
        "dropout": "dropout",
        "dropatt": "attention_dropout",
        "div_val": "adaptive_input_factor",
    }.items():
        assert config.get(theirs) == preset.get(ours), theirs
    assert ",".join(map(str, config["cutoffs"])) == preset.get("adaptive_input_cutoff", "")
