import pytest
import torch

from scripts._shared.checkpoints import load_checkpoint, options_of, read_checkpoint
from tests.scripts.evaluate.saved_models import Mischief, write_checkpoint


def test_a_checkpoint_cannot_run_anything(tmp_path):
    torch.save({"model": Mischief(tmp_path / "made")}, tmp_path / "bad.pt")
    message = r"^--path .*bad.pt holds more than weights and options, and is not"
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path / "bad.pt", "--path")
    assert not (tmp_path / "made").exists()


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none.pt is no file: name one that fairseq-train wrote"):
        load_checkpoint(tmp_path / "none.pt")
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl")
    assert load_checkpoint(tmp_path / "xl.pt")["optimizer_history"][-1]["num_updates"] == 1
    (tmp_path / "short.pt").write_bytes((tmp_path / "xl.pt").read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"short.pt is cut short or damaged \(its end is mi"):
        load_checkpoint(tmp_path / "short.pt")
    other = {"cfg": {"model": {"_name": "transformer_lm"}}}
    for name, content in (("'transformer_lm'", other), ("None", {"cfg": None}), ("None", [1])):
        torch.save(content, tmp_path / "other.pt")
        message = f"other.pt holds the model {name}, which is no segment language model"
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path / "other.pt")


def test_options_are_those_of_a_part(tmp_path):
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl", mem_len=3)
    state = read_checkpoint(tmp_path / "xl.pt")
    assert options_of(state, "model")["mem_len"] == 3
    assert options_of(state, "task")["_name"] == "segment_language_modeling"
    assert options_of(state, "criterion") == {}
