"""The importer refuses bad input before it writes anything, and executes nothing."""

import sys

import pytest
import torch

from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    adaptive_span,
    run_importer,
    transformer_xl,
    transformer_xl_tensorflow,
)
from tests.scripts.evaluate.saved_models import UnsafePickle

OF_ADAPTIVE_SPAN = adaptive_span(cutoffs=CUTOFFS)
OF_TENSORFLOW = transformer_xl_tensorflow(CUTOFFS, 2)
OF_HUGGING_FACE = transformer_xl(CUTOFFS, 2, hugging_face=True)
PLAIN, BANDS = transformer_xl(), transformer_xl(CUTOFFS, 2)
LATE_CUTOFFS = {"adapt_io_params": {"adapt_io_enabled": True, "adapt_io_cutoffs": [9, 30]}}


@pytest.fixture
def refused(tmp_path, capsys):
    """Check that the importer refuses a model's files, and return its error message."""

    def check(foreign, write=True, name="model.pt"):
        if write:
            foreign.write(tmp_path)
        assert run_importer(foreign, tmp_path, tmp_path / "output", name) == 1
        assert not list(tmp_path.glob("output*"))
        printed = capsys.readouterr()
        assert printed.out == ""
        return printed.err

    return check


@pytest.mark.parametrize(
    ("foreign", "changed", "message"),
    [
        (BANDS, {"n_token": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (BANDS, {"d_head": 9}, "d_head is 9 in CONFIG"),
        (BANDS, {"d_embed": 8}, "d_embed is 8 in CONFIG"),
        (BANDS, {"attn_type": 2}, "attn_type is 2 in CONFIG"),
        (BANDS, {"ext_len": 4}, "ext_len is 4 in CONFIG"),
        (BANDS, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06 in CONFIG"),
        (BANDS, {"cutoffs": [9, 16, 30]}, "cutoffs end at 30, beyond the vocabulary"),
        (BANDS, {"pre_lnorm": None}, "pre_lnorm is missing"),
        (BANDS, {"group": {"mem_len": 3}}, "mem_len occurs twice"),
        *((BANDS, {"mem_len": value}, "mem_len is") for value in (-1, 2.0, True)),
        *((BANDS, {"dropout": value}, "dropout is") for value in (1, True, float("nan"))),
        *((BANDS, {"cutoffs": x}, "cutoffs is") for x in ([2, 1], [1, 1], [0, 1], [1.0], 3)),
        *((BANDS, {"tie_projs": x}, "tie_projs is") for x in ([True] * 3, [True, 0, 1, True])),
        # rules of the model, not of the importer
        (transformer_xl([9, 16, 22, 24, 26], 4), {}, "leave the last band less than one of the"),
        (PLAIN, {"same_length": True, "mem_len": 0}, "give --mem-len"),
        (OF_HUGGING_FACE, {"vocab_size": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (OF_TENSORFLOW, {"n_token": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (OF_TENSORFLOW, {"cutoffs": []}, "div_val is 2 in CONFIG"),
        (OF_TENSORFLOW, {"same_length": None}, "same_length is missing"),
        (OF_ADAPTIVE_SPAN, {"nb_heads": 3}, "but the configuration says 3 x 1 x 1"),
        (OF_ADAPTIVE_SPAN, {"vocab_size": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (OF_ADAPTIVE_SPAN, LATE_CUTOFFS, "adapt_io_cutoffs end at 30, beyond the vocabulary"),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, refused, foreign, changed, message):
    error = refused(foreign._replace(config={**foreign.config, **changed}))
    assert message.replace("CONFIG", f"--config {tmp_path}/config.json") in error


def test_the_codes_own_defaults_may_be_missing(tmp_path):
    foreign = transformer_xl_tensorflow(CUTOFFS, 1)
    for name in ("untie_r", "div_val", "proj_share_all_but_first", "proj_same_dim", "d_embed"):
        del foreign.config[name]
    foreign.config["settings"] = {"t7": {"mem_len": 3}}  # nested groups are not options
    foreign.write(tmp_path)
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 0


@pytest.mark.parametrize("foreign", [BANDS, OF_TENSORFLOW, OF_ADAPTIVE_SPAN])
def test_wrong_vocabularies_are_refused(tmp_path, refused, foreign):
    late = foreign._replace(symbols=[*SYMBOLS[5:], *SYMBOLS[:5]])
    assert "<eos> and <unk> must be among the first 9 symbols" in refused(late)
    for symbol, problem in (
        ("", "is empty or has spaces"),
        ("a b", "is empty or has spaces"),
        ("<pad>", "is a special symbol of fairseq's"),
    ):
        message = refused(foreign._replace(symbols=["<eos>", symbol, *SYMBOLS[6:], "<unk>"]))
        assert f"--vocab {tmp_path}/vocab.txt, line 2: {symbol!r} {problem}" in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.pt", None, "--checkpoint FOLDER/model.pt is not a file"),
        ("model.pt", b"PK\x03\x04", "--checkpoint FOLDER/model.pt cannot be read; it may be cut"),
        ("config.json", None, "--config FOLDER/config.json is not a file"),
        ("config.json", b"{", "--config FOLDER/config.json is not JSON"),
        ("config.json", b"[1]", "--config FOLDER/config.json has no options"),
        ("vocab.txt", None, "--vocab FOLDER/vocab.txt is not a file"),
        ("vocab.txt", b"\xff", "--vocab FOLDER/vocab.txt is not UTF-8"),
        ("model.pt", {}, "--checkpoint FOLDER/model.pt holds dict, not tensors by name"),
        ("model.pt", [torch.ones(2)], "model.pt holds list, not tensors by name"),
        ("model.pt", {0: torch.ones(2), "lr": 0.1}, "more than tensors by name: 'lr', 0"),
        ("model.pt", torch.nn.Linear(2, 2), "torch.save(model.state_dict(), "),
        ("model.pt", {"z": UnsafePickle("executed")}, "model.pt holds more than weights and opti"),
    ],
)
def test_files_that_cannot_be_read_are_named(
    tmp_path, monkeypatch, refused, name, content, message
):
    monkeypatch.chdir(tmp_path)
    path = PLAIN.write(tmp_path) / name
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert message.replace("FOLDER", str(tmp_path)) in refused(PLAIN, write=False)
    assert not (tmp_path / "executed").exists()


def test_all_that_does_not_fit_is_listed_at_once(tmp_path, refused):
    foreign = transformer_xl(CUTOFFS, 2)
    tensors = dict(foreign.tensors)
    del tensors["r_w_bias"]
    tensors["r_r_bias"] = tensors["r_r_bias"].T
    tensors["layers.0.dec_attn.o_net.weight"][3, 4] = torch.nan
    tensors["layers.0.dec_attn.r_net.weight"] = torch.zeros(16, 16, dtype=torch.long)
    tensors["layers.1.dec_attn.r_net.weight"] = torch.zeros(16, 16).to_sparse()
    tensors["crit.out_layers.1.weight"] = tensors["crit.out_layers.1.weight"] + 1
    tensors["crit.out_projs.2"] = tensors["crit.out_projs.2"] * 2
    tensors["another"] = torch.zeros(())
    foreign.config.update(attn_type=1, n_token=31)
    message = refused(foreign._replace(tensors=tensors, symbols=[*SYMBOLS[:-1], "w0"]))
    check_problems(
        message,
        f"--vocab {tmp_path}/vocab.txt, line 30: 'w0' occurs twice",
        f"--config {tmp_path}/config.json: it has 31 symbols, and the vocabulary has 30",
        f"attn_type is 1 in --config {tmp_path}/config.json: ",
        "crit.out_layers.1.weight differs from word_emb.emb_layers.1.weight: ",
        "crit.out_projs.2 differs from word_emb.emb_projs.2: ",
        "the checkpoint lacks r_w_bias (2 x 8)",
        "r_r_bias is 8 x 2, but the configuration says 2 x 8",
        "layers.0.dec_attn.o_net.weight has a number that is not finite",
        "layers.0.dec_attn.r_net.weight is not a dense tensor of floating-point numbers",
        "layers.1.dec_attn.r_net.weight is not a dense tensor of floating-point numbers",
        "the checkpoint's 'another' is not used",
    )


def check_problems(message, *problems):
    """Check that the lines after the first begin with these problems, in any order."""
    lines = sorted(message.splitlines()[1:])
    for line, problem in zip(lines, sorted(problems), strict=True):
        assert line.startswith(f"  - {problem}")


def test_all_that_does_not_fit_has_tensorflows_names(refused):
    foreign = transformer_xl_tensorflow(CUTOFFS, 2, untie_r=True)
    tensors, softmax = dict(foreign.tensors), "transformer/adaptive_softmax"
    tensors["transformer/layer_1/ff/layer_1/kernel"] = torch.zeros(24, 16)
    tensors[f"{softmax}/cutoff_2/proj"] = torch.zeros(4, 16)
    tensors["transformer/layer_2/rel_attn/o/kernel"] = torch.zeros(16, 16)
    check_problems(
        refused(foreign._replace(tensors=tensors)),
        f"{softmax}/cutoff_2/proj differs from transformer/adaptive_embed/cutoff_2/proj_W: ",
        "transformer/layer_1/ff/layer_1/kernel is 24 x 16, but the configuration says 16 x 24",
        "the checkpoint's 'transformer/layer_2/rel_attn/o/kernel' is not used",
    )


def test_safetensors_that_cannot_be_read_are_refused(tmp_path, monkeypatch, refused):
    path = PLAIN.write(tmp_path, "model.safetensors") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:40])
    message = refused(PLAIN, write=False, name=path.name)
    assert f"--checkpoint {path} is cut short or damaged" in message
    monkeypatch.setitem(sys.modules, "safetensors", None)
    message = refused(PLAIN, write=False, name=path.name)
    assert "needs the package safetensors: pip install safetensors" in message


@pytest.mark.parametrize("name", ["output", "output/mine"])
def test_output_that_is_there_is_kept(tmp_path, capsys, name):
    PLAIN.write(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert run_importer(PLAIN, tmp_path, tmp_path / "output") == 1
    assert f"--output {tmp_path}/output already exists: " in capsys.readouterr().err
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, 130), (RuntimeError("no room"), 1)]
)
def test_an_interrupted_write_leaves_no_output(tmp_path, monkeypatch, error, status):
    PLAIN.write(tmp_path)

    def fail(state, path):
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(torch, "save", fail)
    assert run_importer(PLAIN, tmp_path, tmp_path / "output") == status
    assert not list(tmp_path.glob("output*"))
    monkeypatch.undo()
    # left by a killed run
    (tmp_path / "output.partial").mkdir()
    (tmp_path / "output.partial" / "left").touch()
    assert run_importer(PLAIN, tmp_path, tmp_path / "output") == 0
    assert [path.name for path in tmp_path.glob("output*")] == ["output"]
    assert not (tmp_path / "output" / "left").exists()
