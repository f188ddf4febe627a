"""What the importer writes and says, and what it refuses before it writes anything."""

import json
import os
from pathlib import Path

import pytest
import torch

from scripts.convert import checkpoint as import_checkpoint
from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    WRITTEN,
    run_importer,
    transformer_xl,
)


def test_what_was_written_is_said(tmp_path, capsys):
    foreign = transformer_xl()
    foreign.config["untie_me"] = True
    foreign.write(tmp_path)
    assert run_importer(foreign, tmp_path, tmp_path / "a" / "output") == 0
    # tied ones count once, sinusoids not at all, and two symbols are made up
    different = {t.data_ptr(): t for n, t in foreign.tensors.items() if "inv_freq" not in n}
    parameters = sum(tensor.numel() for tensor in different.values()) + 2 * (16 + 1)
    assert capsys.readouterr().out.splitlines() == [
        f"{parameters:,} parameters, 30 symbols",
        "options that say nothing of the model, or nothing here: div_val, tie_projs, untie_me",
        f"written to {tmp_path}/a/output/checkpoint.pt, dict.txt and options.txt",
    ]
    assert sorted(path.name for path in (tmp_path / "a" / "output").iterdir()) == WRITTEN


@pytest.mark.parametrize("name", WRITTEN)
def test_existing_output_is_refused(tmp_path, capsys, name):
    foreign = transformer_xl()
    foreign.write(tmp_path)
    output = tmp_path / "output"
    output.mkdir()
    (output / name).write_text("mine")
    assert run_importer(foreign, tmp_path, output) == 1
    message = f"--output {output} has {name} already: name another folder, or remove them"
    assert message in capsys.readouterr().err
    assert [path.read_text() for path in output.iterdir()] == ["mine"]


def test_an_output_that_is_no_folder_is_refused(tmp_path, capsys):
    foreign = transformer_xl()
    foreign.write(tmp_path)
    (tmp_path / "output").write_text("mine")
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    assert f"--output {tmp_path}/output" in capsys.readouterr().err
    assert (tmp_path / "output").read_text() == "mine"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.pt", None, "--checkpoint FOLDER/model.pt is no file"),
        ("model.pt", b"PK\x03\x04", "--checkpoint FOLDER/model.pt is broken"),
        ("config.json", None, "--config FOLDER/config.json is no file"),
        ("config.json", b"{", "--config FOLDER/config.json is not JSON"),
        ("vocab.txt", None, "--vocab FOLDER/vocab.txt is no file"),
        ("vocab.txt", b"\xff", "--vocab FOLDER/vocab.txt is not UTF-8"),
        ("vocab.txt", b"<eos>\n", "it has 30 symbols, and the vocabulary has 1"),
    ],
)
def test_nothing_is_written_of_files_that_cannot_be_read(tmp_path, capsys, name, content, message):
    foreign = transformer_xl()
    foreign.write(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    printed = capsys.readouterr()
    assert message.replace("FOLDER", str(tmp_path)) in printed.err
    assert printed.out == ""
    assert not (tmp_path / "output").exists()


def test_a_whole_model_is_refused_and_not_executed(tmp_path, capsys):
    foreign = transformer_xl()
    foreign.write(tmp_path)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    assert 'torch.save(model.state_dict(), "weights.pt")' in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch, capsys):
    foreign = transformer_xl()
    foreign.write(tmp_path)

    replace = os.replace
    for after, error, status, told in (
        (0, KeyboardInterrupt, 130, "interrupted"),
        (1, KeyboardInterrupt, 130, "interrupted"),
        (2, OSError("no room"), 1, "cannot be written (no room): give a folder in a place with"),
    ):
        left = iter(range(after))

        def failing(*paths, left=left, error=error):
            if next(left, None) is None:
                raise error
            replace(*paths)

        monkeypatch.setattr(import_checkpoint.os, "replace", failing)
        assert run_importer(foreign, tmp_path, tmp_path / "output") == status
        assert not list((tmp_path / "output").iterdir())
        assert told in capsys.readouterr().err


class Killed(BaseException):
    """Stands for a signal that no program can catch: what follows it does not happen."""


@pytest.mark.parametrize("after", [0, 1, 2])
def test_what_was_killed_while_it_wrote_is_done_again(tmp_path, monkeypatch, capsys, after):
    foreign = transformer_xl()
    foreign.write(tmp_path)
    output, replace = tmp_path / "output", os.replace
    left = iter(range(after))

    def kill(*paths):
        if next(left, None) is None:
            raise Killed
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(import_checkpoint.os, "replace", kill)
        patch.setattr(Path, "unlink", lambda path, missing_ok: None)
        with pytest.raises(Killed):
            run_importer(foreign, tmp_path, output)
    assert not (output / "checkpoint.pt").exists()
    assert run_importer(foreign, tmp_path, output) == 0
    assert sorted(path.name for path in output.iterdir()) == WRITTEN
    # complete, it is refused as ever
    assert run_importer(foreign, tmp_path, output) == 1
    assert "has checkpoint.pt, dict.txt, options.txt already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("n_layer", "n_layer is 1000000000, and the checkpoint has 28 tensors"),
        ("d_model", "d_model is 1000000000, and the checkpoint's longest dimension is 48"),
        ("d_inner", "d_inner is 1000000000, and the checkpoint's longest dimension is 48"),
    ],
)
def test_sizes_that_no_tensor_has_take_no_memory(tmp_path, capsys, option, message):
    foreign = transformer_xl()
    foreign._replace(config={**foreign.config, option: 10**9}).write(tmp_path)
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_options_that_no_model_has_are_refused(tmp_path, capsys):
    """They pass the importer, which has no rules of its own for them, and fairseq's models not."""
    foreign = transformer_xl([9, 16, 22, 24, 26], 4)
    foreign.write(tmp_path)
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    assert "leave the last band less than one of the" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()


def test_all_that_does_not_fit_is_listed_at_once(tmp_path, capsys):
    foreign = transformer_xl(CUTOFFS, 2)
    tensors = dict(foreign.tensors)
    del tensors["r_w_bias"]
    tensors["r_r_bias"] = tensors["r_r_bias"].T
    tensors["layers.0.dec_attn.o_net.weight"][3, 4] = torch.nan
    tensors["crit.out_layers.1.weight"] = tensors["crit.out_layers.1.weight"] + 1
    tensors["crit.out_projs.2"] = tensors["crit.out_projs.2"] * 2
    tensors["layers.2.dec_attn.o_net.weight"] = torch.zeros(16, 16)
    tensors["another"] = torch.zeros(())
    foreign = foreign._replace(tensors=tensors, symbols=[*SYMBOLS[:-1], "w0"])
    foreign.config.update(attn_type=1, n_token=31)
    foreign.write(tmp_path)
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    tied = "the configuration says tied, the weights are not"
    assert capsys.readouterr().err.splitlines() == [
        "error: the files do not fit together, and nothing was written:",
        f"  - --vocab {tmp_path}/vocab.txt, line 30: 'w0' occurs twice",
        f"  - --config {tmp_path}/config.json: it has 31 symbols, and the vocabulary has 30",
        f"  - attn_type is 1 in --config {tmp_path}/config.json: only 0, Transformer-XL's own "
        "attention, is known",
        f"  - crit.out_layers.1.weight differs from word_emb.emb_layers.1.weight: {tied}",
        f"  - crit.out_projs.2 differs from word_emb.emb_projs.2: {tied}",
        "  - the checkpoint lacks r_w_bias (2 x 8)",
        "  - r_r_bias is 8 x 2, and by the configuration 2 x 8",
        "  - layers.0.dec_attn.o_net.weight has a number that is not finite",
        "  - nothing takes 'another' of the checkpoint",
        "  - nothing takes 'layers.2.dec_attn.o_net.weight' of the checkpoint",
    ]
    assert not (tmp_path / "output").exists()


def test_a_config_without_sizes_is_refused_before_tensors_are_compared(tmp_path, capsys):
    foreign = transformer_xl()
    foreign.write(tmp_path)
    config = {name: value for name, value in foreign.config.items() if name != "d_model"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_type": 2}))
    assert run_importer(foreign, tmp_path, tmp_path / "output") == 1
    printed = capsys.readouterr().err
    label = f"--config {tmp_path}/config.json"
    assert f"{label} lacks d_model: a whole number of at least 1" in printed
    assert f"attn_type is 2 in {label}" in printed
    assert "the checkpoint" not in printed
