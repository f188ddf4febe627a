import pytest
import torch

from scripts._shared.checkpoints import load_checkpoint, read_checkpoint
from tests.scripts.evaluate.saved_models import Mischief, write_checkpoint


def test_a_checkpoint_cannot_run_anything(tmp_path):
    torch.save({"model": Mischief(tmp_path / "made")}, tmp_path / "bad.pt")
    message = r"^--path .*bad.pt holds more than weights and options, and is not"
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path / "bad.pt", "--path")
    assert not (tmp_path / "made").exists()


def test_only_a_segment_language_model_is_loaded(tmp_path):
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl")
    assert load_checkpoint(tmp_path / "xl.pt")["optimizer_history"][-1]["num_updates"] == 1
    other = {"cfg": {"model": {"_name": "transformer_lm"}}}
    for name, content in (("'transformer_lm'", other), ("None", {"cfg": None}), ("None", [1])):
        torch.save(content, tmp_path / "other.pt")
        message = f"other.pt holds the model {name}, which is no segment language model"
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path / "other.pt")
