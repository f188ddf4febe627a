"""Files, options, vocabularies and tensors that do not fit are refused by name."""

import re

import pytest
import torch

from fairseq_plugins import register
from scripts.convert import checkpoint, huggingface
from tests.product_key_memory.tiny import MEMORY
from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    adaptive_span,
    importer_words,
    transformer_xl,
    transformer_xl_tensorflow,
)
from tests.scripts.evaluate.saved_models import UnsafePickle, write_checkpoint, write_text
from tests.scripts.prepare.prepared import write_files
from tests.scripts.refusals import refused

SPANS = adaptive_span(cutoffs=CUTOFFS)
TENSORFLOW = transformer_xl_tensorflow(CUTOFFS, 2, untie_r=True)
BANDS = transformer_xl(CUTOFFS, 2)
FEED_FORWARD = "transformer/layer_1/ff/layer_1/kernel"
PROJECTION = "transformer/adaptive_softmax/cutoff_2/proj"


@pytest.fixture
def import_refused(tmp_path, check_refusal):
    """Check that the importer refuses files in ``tmp_path`` with an error that has some words."""

    def check(source, words, name="model.pt"):
        line = importer_words(source, tmp_path, name)
        check_refusal(checkpoint.main, line, f".*{re.escape(words)}")

    return check


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.pt", None, "--checkpoint FOLDER/model.pt is not a file"),
        ("model.safetensors", b"PK", "--checkpoint FOLDER/model.safetensors cannot be read"),
        ("config.json", b"[1]", "--config FOLDER/config.json does not hold options"),
        ("vocab.txt", b"\xff", "--vocab FOLDER/vocab.txt cannot be read"),
        ("model.pt", {"a": torch.ones(2), "lr": 0.1}, "holds other things than tensors by name"),
        ("model.pt", {"z": UnsafePickle("executed")}, "model.pt holds more than weights and opti"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path, monkeypatch, import_refused, name, content, message
):
    monkeypatch.chdir(tmp_path)
    path = BANDS.write(tmp_path) / name
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    read = name if name.startswith("model") else "model.pt"
    import_refused(BANDS.source, message.replace("FOLDER", str(tmp_path)), read)
    assert not (tmp_path / "executed").exists()


def config(**options):
    """Return a change of a model: other options."""
    return lambda foreign: foreign._replace(config={**foreign.config, **options})


def symbols(*listed):
    """Return a change of a model: another vocabulary."""
    return lambda foreign: foreign._replace(symbols=listed)


def tensor(name, change=None):
    """Return a change of a model: of a tensor, or to leave it out."""

    def changed(foreign):
        tensors = dict(foreign.tensors)
        before = tensors.pop(name, None)
        return foreign._replace(tensors=tensors | ({name: change(before)} if change else {}))

    return changed


@pytest.mark.parametrize(
    ("foreign", "change", "named"),
    [
        (BANDS, config(d_head=9), "d_head is 9"),
        (BANDS, config(d_embed=8), "d_embed is 8"),
        (BANDS, config(attn_type=2), "attn_type is 2"),
        (BANDS, config(ext_len=4), "ext_len is 4"),
        (BANDS, config(layer_norm_epsilon=1e-6), "layer_norm_epsilon is 1e-06"),
        # no tensor reveals that it is missing
        (BANDS, config(pre_lnorm=None), "pre_lnorm is missing: it must be true or false"),
        (TENSORFLOW, config(same_length=None), "same_length is missing"),
        (SPANS, config(vocab_size=31), "vocab_size is 31"),
        (BANDS, config(div_val=0), "(div_val) is 0"),
        (BANDS, config(tie_projs=[True]), "tie_projs has 1 values for"),
        (BANDS, symbols(*SYMBOLS[5:], *SYMBOLS[:5]), "first 9 symbols"),
        *(
            (BANDS, symbols("<eos>", symbol, *SYMBOLS[5:-1], "<unk>"), f"line 2: {symbol!r}")
            for symbol in ("", "a b", "<pad>", "<eos>")
        ),
        (BANDS, tensor("r_w_bias"), "lacks r_w_bias, (2, 8)"),
        (BANDS, tensor("r_r_bias", torch.t), "r_r_bias has the shape (8, 2)"),
        (BANDS, tensor("crit.out_projs.2", torch.neg), "crit.out_projs.2 differs"),
        (BANDS, tensor("another", lambda _: torch.zeros(())), "another are not used"),
        # TensorFlow's matrices are transposed
        (TENSORFLOW, tensor(FEED_FORWARD, torch.t), f"{FEED_FORWARD} has the shape (16, 24)"),
        # which the model has under another name
        (TENSORFLOW, tensor(PROJECTION, lambda _: torch.zeros(4, 16)), f"{PROJECTION} differs"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, import_refused, foreign, change, named):
    change(foreign).write(tmp_path)
    import_refused(foreign.source, named)


def test_hugging_face_refuses_memories_another_tokenizer_and_a_full_folder(
    tmp_path, call, monkeypatch
):
    pytest.importorskip("transformers", reason="pip install '.[huggingface]'")
    register()
    from fairseq_plugins.huggingface import DictionaryTokenizer

    def refuses(*named, **options):
        write_checkpoint(tmp_path / "model.pt", "transformer_xl", mem_len=4, **options)
        words = [tmp_path / "model.pt", tmp_path / "output", "--data", tmp_path / "data"]
        return refused(call(huggingface.main, *words), *named)

    write_text(tmp_path / "data")
    assert refuses("transformer_xl model with product-key", memory_layers="2", **MEMORY)
    monkeypatch.setattr(DictionaryTokenizer, "_tokenize", lambda self, text: text.split())
    assert refuses("the tokenizer that units.json describes differs")
    assert not list(tmp_path.glob("output*"))
    write_files(tmp_path, {"output/file": ""})
    assert refuses("is there already")
