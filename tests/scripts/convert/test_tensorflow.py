"""TensorFlow's files: what is read of them, what is refused, and that nothing is executed."""

import pickle
import re
import sys
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.convert._foreign import ForeignVocabulary
from scripts.convert._tensorflow import read_bundle
from tests.scripts.convert.foreign_models import run_importer, transformer_xl_tensorflow
from tests.scripts.convert.tensor_bundle import entry, field, table, write_bundle

KEPT = {
    "model/a": torch.arange(6.0).view(2, 3),
    "model/a/kernel": torch.linspace(-1, 1, 5),
    "model/b": torch.ones(3, 1, dtype=torch.float64),
    "model/half": torch.full((2, 2), 0.5, dtype=torch.float16),
    "one": torch.tensor(7.0),
}
LEFT_OUT = {
    "beta1_power": torch.tensor(0.9),
    "scope/beta2_power": torch.tensor(0.99),
    "global_step": torch.tensor(1000),
    "model/a/Adam": torch.ones(2, 3),
    "model/a/Adam_1": torch.ones(2, 3),
}
ANEW = "copy all of the checkpoint's files anew"
NO_INDEX = f"x.index is cut short, changed or no index of TensorFlow's: {ANEW}"


@pytest.fixture
def path(tmp_path):
    """A checkpoint in one file."""
    write_bundle(tmp_path / "x", {**KEPT, **LEFT_OUT})
    return tmp_path / "x"


def beside(path, suffix):
    return path.with_name(f"{path.name}.{suffix}")


def refused(path):
    """The message that a checkpoint is refused with, without the option that names it."""
    label = f"--checkpoint {path}: "
    with pytest.raises(ValueError, match=f"^{re.escape(label)}") as error:
        read_bundle(path)
    return str(error.value).removeprefix(label)


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("suffix", ["", ".index", ".meta", ".data-00000-of-00001"])
def test_tensors_are_read_without_the_optimizers(tmp_path, files, suffix):
    write_bundle(tmp_path / "model.ckpt-0", {**KEPT, **LEFT_OUT}, files)
    found = read_bundle(tmp_path / f"model.ckpt-0{suffix}")
    assert found.keys() == KEPT.keys()
    for name, tensor in KEPT.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def changed(data, place):
    return data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]


@pytest.mark.parametrize("damage", [changed, lambda data, place: data[:place]])
def test_a_damaged_index_is_refused_wherever_it_is_damaged(path, damage):
    index = beside(path, "index")
    whole = index.read_bytes()
    for place in range(len(whole)):
        index.write_bytes(damage(whole, place))
        assert refused(path) == NO_INDEX


@pytest.mark.parametrize("damage", [changed, lambda data, place: data[:place]])
def test_damaged_data_are_refused_wherever_they_are_damaged(path, damage):
    data = beside(path, "data-00000-of-00001")
    whole, names = data.read_bytes(), "|".join({**KEPT, **LEFT_OUT})
    message = rf"{data.name} is cut short or changed at ({names}): {ANEW}"
    for place in range(len(whole)):
        data.write_bytes(damage(whole, place))
        assert re.fullmatch(message, refused(path))


@pytest.mark.parametrize("content", [b"", b"hello world", b"\x57\xfb\x80\x8b\x24\x75\x47\xdb" * 9])
def test_another_file_is_refused(path, content):
    beside(path, "index").write_bytes(content)
    assert refused(path) == NO_INDEX


@pytest.mark.parametrize(
    "index",
    [
        # another order of bytes, no header, a header of something else, a compressed block
        table({b"": field(1, 1) + field(2, 1), b"a": entry(1, [1], 0, 0, b"abcd")}),
        table({b"a": entry(1, [1], 0, 0, b"abcd")}),
        table({b"": field(1, b"x") + field(2, 0) + b"\x0b"}),
        table({b"": field(1, 1)}, compression=1),
    ],
)
def test_an_index_of_another_kind_is_refused(path, index):
    beside(path, "index").write_bytes(index)
    assert refused(path) == NO_INDEX


def test_missing_files_are_named(tmp_path):
    write_bundle(tmp_path / "x", KEPT, files=3)
    for number in (0, 2):
        (tmp_path / f"x.data-0000{number}-of-00003").unlink()
    names = "x.data-00000-of-00003, x.data-00002-of-00003"
    assert refused(tmp_path / "x") == f"there is no {names}: {ANEW}"
    (tmp_path / "x.index").unlink()
    no_index = "there is no {}.index: name a TensorFlow checkpoint, such as model.ckpt-0"
    assert refused(tmp_path / "x") == no_index.format("x")
    assert refused(tmp_path) == no_index.format(tmp_path.name)


def test_an_index_reaches_no_file_but_its_own(tmp_path):
    (tmp_path / "x.data-00000-of-00002").write_bytes(b"abcd")
    for file, place, message in (
        (2**63, 0, f"there is no x.data-{2**63}-of-00002: {ANEW}"),
        (0, 2**63, f"x.data-00000-of-00002 is cut short or changed at ../up: {ANEW}"),
        (0, 10**30, NO_INDEX),
    ):
        rows = {b"": field(1, 2), b"../up": entry(1, [1], file, place, b"abcd")}
        (tmp_path / "x.index").write_bytes(table(rows))
        assert refused(tmp_path / "x") == message
    rows = {b"": field(1, 2), b"../up": field(1, 1) + field(3, b"../../file")}
    (tmp_path / "x.index").write_bytes(table(rows))
    assert refused(tmp_path / "x") == NO_INDEX


@pytest.mark.parametrize(
    ("kind", "shape", "data"),
    [
        (9, [1], bytes(8)),  # whole numbers
        (7, [2], b"\x01\x01ab"),  # text
        (1, [2], bytes(4)),  # fewer numbers than the shape has
        (1, [0, 2**63], b""),
    ],
)
def test_other_tensors_come_without_values(tmp_path, kind, shape, data):
    rows = {b"": field(1, 1), b"odd": entry(kind, shape, 0, 0, data)}
    (tmp_path / "x.index").write_bytes(table(rows))
    (tmp_path / "x.data-00000-of-00001").write_bytes(data)
    assert read_bundle(tmp_path / "x")["odd"].is_meta


def test_checksums_take_a_package(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    message = "needs the package google-crc32c: pip install google-crc32c"
    with pytest.raises(ValueError, match=f"^--source transformer-xl-tensorflow {message}$"):
        read_bundle(path)


def test_all_that_does_not_fit_is_listed_by_tensorflows_names(tmp_path, capsys):
    foreign = transformer_xl_tensorflow([9, 16, 22], 2, untie_r=True)
    tensors, softmax = dict(foreign.tensors), "transformer/adaptive_softmax"
    del tensors["transformer/r_w_bias"]
    tensors["transformer/r_r_bias"] = tensors["transformer/r_r_bias"][0]
    tensors["transformer/layer_1/ff/layer_1/kernel"][3, 4] = torch.nan
    tensors["transformer/layer_0/rel_attn/LayerNorm/beta"] = torch.ones(16, dtype=torch.long)
    tensors[f"{softmax}/cutoff_2/proj"] = torch.zeros(4, 16)
    tensors["transformer/layer_2/rel_attn/o/kernel"] = torch.zeros(16, 16)
    foreign = foreign._replace(tensors=tensors)
    foreign.config["n_token"] = 31
    foreign.write(tmp_path)
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    layer = "transformer/layer_0/rel_attn/LayerNorm/beta"
    assert capsys.readouterr().err.splitlines() == [
        "error: the files do not fit together, and nothing was written:",
        f"  - --config {tmp_path}/config.json: it has 31 symbols, and the vocabulary has 30",
        f"  - {softmax}/cutoff_2/proj differs from transformer/adaptive_embed/cutoff_2/proj_W: the "
        "configuration says tied, the weights are not",
        "  - the checkpoint lacks transformer/r_w_bias (2 x 2 x 8)",
        "  - transformer/r_r_bias is 2 x 8, and by the configuration 2 x 2 x 8",
        f"  - {layer} is not of floating-point numbers, all of them there",
        "  - transformer/layer_1/ff/layer_1/kernel has a number that is not finite",
        "  - nothing takes 'transformer/layer_2/rel_attn/o/kernel' of the checkpoint",
    ]
    assert not (tmp_path / "output").exists()


def test_nothing_is_written_of_a_damaged_checkpoint(tmp_path, capsys):
    foreign = transformer_xl_tensorflow()
    foreign.write(tmp_path)
    data = tmp_path / "model.pt.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: --checkpoint {tmp_path}/model.pt: {data.name} is cut short")
    assert not (tmp_path / "output").exists()


# as Python 2 wrote it: text is bytes
OF_PYTHON_2 = (
    b"\x80\x02c__main__\nCorpus\n)\x81}U\x05vocabcvocabulary\nVocab\n)\x81}"
    b"U\x07idx2sym](U\x05<eos>U\x02\xc3\xa9esbsb."
)


class Corpus:
    def __init__(self, symbols):
        self.dataset = "wt103"
        self.train = np.arange(5)
        self.vocab = Vocab(symbols)


class Vocab:
    def __init__(self, symbols):
        self.counter = Counter(symbols)
        self.idx2sym = symbols
        self.sym2idx = OrderedDict((symbol, n) for n, symbol in enumerate(symbols))


class Executed:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 5, None])
def test_symbols_are_read_of_the_cached_data(tmp_path, protocol):
    cache = tmp_path / "cache.pkl"
    of_python_3 = Corpus(["<eos>", "é"])
    cache.write_bytes(
        OF_PYTHON_2 if protocol is None else pickle.dumps(of_python_3, protocol=protocol)
    )
    problems = []
    assert ForeignVocabulary(cache, problems).symbols == ["<eos>", "é"]
    assert not problems


@pytest.mark.parametrize(
    ("cached", "read"),
    [
        (["a", "<S>", "<UNK>", "</S>"], ["a", "<eos>", "<unk>", "</S>"]),
        (["<S>", "<eos>", "<UNK>"], ["<S>", "<eos>", "<unk>"]),
    ],
)
def test_sentence_ends_of_one_billion_word_are_line_ends(tmp_path, cached, read):
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(Corpus(cached)))
    assert ForeignVocabulary(tmp_path / "cache.pkl", []).symbols == read


def test_blanks_within_cached_symbols_are_made_visible(tmp_path):
    cache = tmp_path / "cache.pkl"
    cache.write_bytes(pickle.dumps(Corpus(["a\u00a0b", "c d"])))
    problems = []
    assert ForeignVocabulary(cache, problems).symbols == ["a\u2423b", "c d"]
    assert problems == [f"--vocab {cache}, line 2: 'c d' is empty or has spaces"]


def test_cached_data_are_not_executed(tmp_path):
    corpus, cache = Corpus(["<eos>", "a"]), tmp_path / "cache.pkl"
    corpus.vocab.special = [Executed(tmp_path / "executed")]
    cache.write_bytes(pickle.dumps(corpus))
    assert ForeignVocabulary(cache, []).symbols == ["<eos>", "a"]
    assert not (tmp_path / "executed").exists()
    # so a loader that executes would be found out
    pickle.loads(cache.read_bytes())
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "content",
    [
        *(pickle.dumps(found) for found in (3, {"vocab": 3}, Vocab(["a"]), Corpus([1]))),
        *(OF_PYTHON_2[:length] for length in range(0, len(OF_PYTHON_2), 7)),
        OF_PYTHON_2.replace(b"\xc3", b"\xff"),
        b"<html>",
    ],
)
def test_other_files_are_no_cached_data(tmp_path, content):
    cache = tmp_path / "cache.pkl"
    cache.write_bytes(content)
    message = f"--vocab {cache} is broken or no cache.pkl of the TensorFlow code"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}: give that file, or a text with"):
        ForeignVocabulary(cache, [])


def test_cached_data_and_a_text_give_the_same_dictionary(tmp_path):
    foreign = transformer_xl_tensorflow()
    foreign.write(tmp_path)
    (tmp_path / "cache.pkl").write_bytes(pickle.dumps(Corpus(foreign.symbols)))
    dictionaries = []
    for name in ("vocab.txt", "cache.pkl"):
        output = tmp_path / f"of {name}"
        assert run_importer(foreign, tmp_path, output, vocabulary=name) == 0
        dictionaries.append((output / "dict.txt").read_text(encoding="utf-8"))
    assert dictionaries[0] == dictionaries[1]
