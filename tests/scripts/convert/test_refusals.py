"""What the importer refuses, before it writes anything, and that it executes nothing."""

import sys
from pathlib import Path

import pytest
import torch

from scripts.convert import _conversion
from scripts.convert._options import ForeignVocabulary
from scripts.convert._tensors import read_tensors
from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    adaptive_span,
    run_importer,
    transformer_xl,
    transformer_xl_tensorflow,
)

LATE = [*SYMBOLS[5:], *SYMBOLS[:5]]
OF_ADAPTIVE_SPAN = adaptive_span(cutoffs=CUTOFFS)
OF_TENSORFLOW = transformer_xl_tensorflow(CUTOFFS, 2)
OF_HUGGING_FACE = transformer_xl(CUTOFFS, 2, hugging_face=True)
PLAIN, BANDS = transformer_xl(), transformer_xl(CUTOFFS, 2)
TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.c": torch.ones(4)}
# in zip archives, and as torch.save wrote before them
FORMATS = pytest.mark.parametrize("archive", [True, False])
WHOLE_MODEL = 'torch.save(model.state_dict(), "weights.pt")'


@pytest.fixture
def refused(tmp_path, capsys):
    """Check that the importer refuses a model's files, and return what it says."""

    def check(foreign, write=True):
        if write:
            foreign.write(tmp_path)
        assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert not list(tmp_path.glob("output*"))
        return printed.err

    return check


@pytest.mark.parametrize(
    ("foreign", "changed", "message"),
    [
        (BANDS, {"n_token": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (BANDS, {"d_head": 9}, "d_head is 9 in CONFIG: here d_head is d_model / n_head"),
        (BANDS, {"d_embed": 8}, "d_embed is 8 in CONFIG: here d_embed is d_model"),
        (BANDS, {"attn_type": 2}, "attn_type is 2 in CONFIG: only 0, Transformer-XL's own"),
        (BANDS, {"ext_len": 4}, "ext_len is 4 in CONFIG: import it with 0"),
        (BANDS, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06 in CONFIG: only 1e-05"),
        (BANDS, {"cutoffs": [9, 16, 30]}, "cutoffs end at 30, beyond the vocabulary"),
        (BANDS, {"pre_lnorm": None}, "pre_lnorm is missing: it must be true or false"),
        (BANDS, {"group": {"mem_len": 3}}, "mem_len occurs twice, with different values"),
        *(
            (BANDS, {"mem_len": value}, "it must be a whole number of at least 0")
            for value in (-1, 2.0, True)
        ),
        *(
            (BANDS, {"dropout": value}, "it must be a number in [0, 1)")
            for value in (1, True, float("nan"))
        ),
        *(
            (BANDS, {"cutoffs": value}, "it must be a list of rising numbers")
            for value in ([2, 1], [1, 1], [0, 1], [1.0], 3)
        ),
        *(
            (BANDS, {"tie_projs": value}, "it must be a list of 4 times true or false")
            for value in ([True] * 3, [True, 0, 1, True])
        ),
        # no rules of the importer's, but of the model's
        (transformer_xl([9, 16, 22, 24, 26], 4), {}, "leave the last band less than one of the"),
        (PLAIN, {"same_length": True, "mem_len": 0}, "give --mem-len"),
        (OF_HUGGING_FACE, {"vocab_size": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (OF_TENSORFLOW, {"n_token": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (OF_TENSORFLOW, {"cutoffs": []}, "div_val is 2 in CONFIG: without cutoffs there is one"),
        (OF_TENSORFLOW, {"same_length": None}, "same_length is missing: it must be true or false"),
        (OF_ADAPTIVE_SPAN, {"nb_heads": 3}, "by the configuration 3 x 1 x 1"),
        (OF_ADAPTIVE_SPAN, {"vocab_size": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (
            OF_ADAPTIVE_SPAN,
            {"adapt_io_params": {"adapt_io_enabled": True, "adapt_io_cutoffs": [9, 30]}},
            "adapt_io_cutoffs end at 30, beyond the vocabulary",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(tmp_path, refused, foreign, changed, message):
    said = refused(foreign._replace(config={**foreign.config, **changed}))
    assert message.replace("CONFIG", f"--config {tmp_path}/config.json") in said


def test_the_codes_own_defaults_may_be_missing(tmp_path):
    foreign = transformer_xl_tensorflow(CUTOFFS, 1)
    for name in ("untie_r", "div_val", "proj_share_all_but_first", "proj_same_dim", "d_embed"):
        del foreign.config[name]
    foreign.config["settings"] = {"t7": {"mem_len": 3}}  # groups within groups are no options
    foreign.write(tmp_path)
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 0


@pytest.mark.parametrize("foreign", [BANDS, OF_TENSORFLOW, OF_ADAPTIVE_SPAN])
def test_special_symbols_beyond_the_first_band_are_refused(refused, foreign):
    late = foreign._replace(symbols=LATE)
    assert "<eos> and <unk> must be among the first 9 symbols" in refused(late)


@pytest.mark.parametrize(
    ("symbols", "messages"),
    [
        (["<eos>", "", "a"], ["2: '' is empty or has spaces"]),
        (["<eos>", "a\u00a0"], ["2: 'a\\xa0' is empty or has spaces"]),
        (["<eos>", "a", "a", "a"], ["3: 'a' occurs twice", "4: 'a' occurs twice"]),
        (["<eos>", "<pad>"], ["2: '<pad>' is a special symbol of fairseq's"]),
        ([], ["1: '' is empty or has spaces"]),
    ],
)
def test_wrong_vocabularies_are_refused(tmp_path, symbols, messages):
    path, problems = tmp_path / "vocab.txt", []
    path.write_text("".join(f"{symbol}\n" for symbol in symbols), encoding="utf-8")
    ForeignVocabulary(path, problems)
    assert problems == [f"--vocab {path}, line {message}" for message in messages]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.pt", None, "--checkpoint FOLDER/model.pt is no file"),
        ("model.pt", b"PK\x03\x04", "--checkpoint FOLDER/model.pt is cut short or damaged"),
        ("config.json", None, "--config FOLDER/config.json is no file"),
        ("config.json", b"{", "--config FOLDER/config.json is not JSON"),
        ("config.json", b"[1]", "--config FOLDER/config.json has no options"),
        ("vocab.txt", None, "--vocab FOLDER/vocab.txt is no file"),
        ("vocab.txt", b"\xff", "--vocab FOLDER/vocab.txt is not UTF-8"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path, refused, name, content, message):
    PLAIN.write(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    assert message.replace("FOLDER", str(tmp_path)) in refused(PLAIN, write=False)


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
    said = refused(foreign._replace(tensors=tensors, symbols=[*SYMBOLS[:-1], "w0"]))
    tied = "the configuration says tied, the weights are not"
    config = f"--config {tmp_path}/config.json"
    first, *others = said.splitlines()
    assert first == "error: the files do not fit together, and nothing was written:"
    assert sorted(others) == sorted(
        [
            f"  - --vocab {tmp_path}/vocab.txt, line 30: 'w0' occurs twice",
            f"  - {config}: it has 31 symbols, and the vocabulary has 30",
            f"  - attn_type is 1 in {config}: only 0, Transformer-XL's own attention, is known",
            f"  - crit.out_layers.1.weight differs from word_emb.emb_layers.1.weight: {tied}",
            f"  - crit.out_projs.2 differs from word_emb.emb_projs.2: {tied}",
            "  - the checkpoint lacks r_w_bias (2 x 8)",
            "  - r_r_bias is 8 x 2, and by the configuration 2 x 8",
            "  - layers.0.dec_attn.o_net.weight has a number that is not finite",
            *(
                f"  - layers.{n}.dec_attn.r_net.weight is not a dense tensor of floating-point "
                "numbers"
                for n in (0, 1)
            ),
            "  - nothing takes 'another' of the checkpoint",
        ]
    )


def test_all_that_does_not_fit_has_tensorflows_names(refused):
    foreign = transformer_xl_tensorflow(CUTOFFS, 2, untie_r=True)
    tensors, softmax = dict(foreign.tensors), "transformer/adaptive_softmax"
    del tensors["transformer/r_w_bias"]
    tensors["transformer/r_r_bias"] = tensors["transformer/r_r_bias"][0]
    tensors["transformer/layer_1/ff/layer_1/kernel"] = torch.zeros(24, 16)
    tensors["transformer/layer_0/rel_attn/LayerNorm/beta"][3] = torch.nan
    tensors[f"{softmax}/cutoff_2/proj"] = torch.zeros(4, 16)
    tensors["transformer/layer_2/rel_attn/o/kernel"] = torch.zeros(16, 16)
    said = refused(foreign._replace(tensors=tensors))
    assert sorted(said.splitlines()[1:]) == sorted(
        [
            f"  - {softmax}/cutoff_2/proj differs from transformer/adaptive_embed/cutoff_2/proj_W: "
            "the configuration says tied, the weights are not",
            "  - the checkpoint lacks transformer/r_w_bias (2 x 2 x 8)",
            "  - transformer/r_r_bias is 2 x 8, and by the configuration 2 x 2 x 8",
            "  - transformer/layer_1/ff/layer_1/kernel is 24 x 16, and by the configuration 16 x "
            "24",
            "  - transformer/layer_0/rel_attn/LayerNorm/beta has a number that is not finite",
            "  - nothing takes 'transformer/layer_2/rel_attn/o/kernel' of the checkpoint",
        ]
    )


def test_sizes_that_are_not_known_keep_tensors_from_being_compared(tmp_path, refused):
    foreign = transformer_xl()
    foreign.config.update(attn_type=2, d_model=None)
    said = refused(foreign)
    assert "d_model is missing" in said
    assert "attn_type is 2" in said
    assert "the checkpoint" not in said


@FORMATS
@pytest.mark.parametrize(
    "content",
    [
        TENSORS,
        {"model": TENSORS, "iter_no": 3, "optimizer": {"lr": 0.1}},
        {"state_dict": {f"module.{name}": tensor for name, tensor in TENSORS.items()}},
        {name: torch.nn.Parameter(tensor) for name, tensor in TENSORS.items()},
    ],
    ids=["plain", "model", "parallel", "parameters"],
)
def test_tensors_are_found(tmp_path, archive, content):
    torch.save(content, tmp_path / "model.pt", _use_new_zipfile_serialization=archive)
    found = read_tensors(tmp_path / "model.pt")
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


class Executed:
    """Its pickle writes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@FORMATS
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds dict, not tensors by name"),
        ([TENSORS], "holds list, not tensors by name"),
        ({"model": {}}, "holds dict, not tensors by name"),
        ({**TENSORS, "epoch": 3, "lr": 0.1}, "more than tensors by name: 'epoch', 'lr': name the"),
        ({0: torch.ones(2)}, "more than tensors by name: 0: name the"),
        (torch.nn.Linear(2, 2), WHOLE_MODEL),
        ({"model": torch.nn.Linear(2, 2)}, WHOLE_MODEL),
    ],
)
def test_files_without_tensors_by_name_are_refused(tmp_path, archive, content, message):
    path = tmp_path / "model.pt"
    torch.save(content, path, _use_new_zipfile_serialization=archive)
    with pytest.raises(ValueError, match=f"^--checkpoint {path} ") as error:
        read_tensors(path)
    assert message in str(error.value)


@FORMATS
def test_nothing_in_a_file_is_executed(tmp_path, archive):
    path, executed = tmp_path / "model.pt", tmp_path / "executed"
    content = {**TENSORS, "z": Executed(executed)}
    torch.save(content, path, _use_new_zipfile_serialization=archive)
    with pytest.raises(ValueError, match="holds more than weights and options"):
        read_tensors(path)
    assert not executed.exists()
    # so a loader that executes would be found out
    torch.load(path, weights_only=False)
    assert executed.exists()


@pytest.mark.parametrize("length", [0, 7, 40, -1])
def test_broken_safetensors_are_refused(tmp_path, monkeypatch, length):
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"is cut short or damaged .*header.*: get it anew"):
        read_tensors(path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="needs the package safetensors: pip install safetensors"):
        read_tensors(path)


@pytest.mark.parametrize("content", ["a file", "a folder"])
def test_output_that_is_there_is_kept(tmp_path, capsys, content):
    PLAIN.write(tmp_path)
    output = tmp_path / "output"
    if content == "a folder":
        output.mkdir()
    mine = output / "mine" if content == "a folder" else output
    mine.write_text("mine")
    assert run_importer(PLAIN, tmp_path, output) == 1
    assert f"--output {output} is there already: name another" in capsys.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (KeyboardInterrupt, 130, "interrupted"),
        (RuntimeError("no room"), 1, "error: --output FOLDER/output: no room: make room, or give"),
        # stands for a signal that no program can catch
        (SystemExit, None, ""),
    ],
)
def test_an_interrupted_write_leaves_no_output(tmp_path, monkeypatch, capsys, error, status, told):
    PLAIN.write(tmp_path)

    def fail(state, path):
        path.write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        if status is None:
            patch.setattr(_conversion.shutil, "rmtree", lambda *_, **__: None)
            with pytest.raises(SystemExit):
                run_importer(PLAIN, tmp_path, tmp_path / "output")
        else:
            assert run_importer(PLAIN, tmp_path, tmp_path / "output") == status
            assert not list(tmp_path.glob("output*"))
            assert told.replace("FOLDER", str(tmp_path)) in capsys.readouterr().err
    assert not (tmp_path / "output").exists()
    # what was killed is done again
    assert run_importer(PLAIN, tmp_path, tmp_path / "output") == 0
    assert [path.name for path in tmp_path.glob("output*")] == ["output"]
