"""Files, options, vocabularies and tensors that do not fit are refused by name."""

import re

import pytest
import torch

from scripts.convert import checkpoint
from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    adaptive_span,
    importer_words,
    transformer_xl,
    transformer_xl_tensorflow,
)
from tests.scripts.evaluate.saved_models import UnsafePickle

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


@pytest.mark.parametrize(
    ("foreign", "changed", "named"),
    [
        (BANDS, {"d_head": 9}, "d_head is 9"),
        (BANDS, {"d_embed": 8}, "d_embed is 8"),
        (BANDS, {"attn_type": 2}, "attn_type is 2"),
        (BANDS, {"ext_len": 4}, "ext_len is 4"),
        (BANDS, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06"),
        # no tensor reveals that it is missing
        (BANDS, {"pre_lnorm": None}, "pre_lnorm is missing: it must be true or false"),
        (TENSORFLOW, {"same_length": None}, "same_length is missing"),
        (SPANS, {"vocab_size": 31}, "vocab_size is 31"),
        (BANDS, {"div_val": 0}, "(div_val) is 0"),
        (BANDS, {"tie_projs": [True]}, "tie_projs has 1 values for"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, import_refused, foreign, changed, named):
    foreign._replace(config={**foreign.config, **changed}).write(tmp_path)
    import_refused(foreign.source, named)


def test_wrong_vocabularies_are_refused(tmp_path, import_refused):
    BANDS._replace(symbols=[*SYMBOLS[5:], *SYMBOLS[:5]]).write(tmp_path)
    import_refused(BANDS.source, "first 9 symbols")
    for symbol in ("", "a b", "<pad>", "<eos>"):
        BANDS._replace(symbols=["<eos>", symbol, *SYMBOLS[5:-1], "<unk>"]).write(tmp_path)
        import_refused(BANDS.source, f"--vocab {tmp_path}/vocab.txt, line 2: {symbol!r}")


@pytest.mark.parametrize(
    ("foreign", "name", "change", "named"),
    [
        (BANDS, "r_w_bias", None, "lacks r_w_bias, (2, 8)"),
        (BANDS, "r_r_bias", torch.t, "r_r_bias has the shape (8, 2)"),
        (BANDS, "crit.out_projs.2", torch.neg, "crit.out_projs.2 differs"),
        (BANDS, "another", lambda tensor: torch.zeros(()), "another are not used"),
        # TensorFlow's matrices are transposed
        (TENSORFLOW, FEED_FORWARD, torch.t, f"{FEED_FORWARD} has the shape (16, 24)"),
        (
            *(TENSORFLOW, PROJECTION, lambda tensor: torch.zeros(4, 16)),
            f"{PROJECTION} differs from transformer/adaptive_embed",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path, import_refused, foreign, name, change, named
):
    tensors = dict(foreign.tensors)
    tensor = tensors.pop(name, None)
    if change:
        tensors[name] = change(tensor)
    foreign._replace(tensors=tensors).write(tmp_path)
    import_refused(foreign.source, named)
