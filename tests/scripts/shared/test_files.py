"""Checkpoints that are read, and files and plots that are written whole or not at all."""

import importlib.util

import pytest
import torch

from scripts._shared.checkpoints import load_checkpoint
from scripts._shared.files import atomic_write
from scripts._shared.results import prepare_results, save_plot
from tests.scripts.evaluate.saved_models import write_checkpoint


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_fails_leaves_the_file_that_was_there(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half():
        with atomic_write(path) as partial:
            partial.write_text("ne")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert (names(tmp_path), path.read_text()) == (["file"], "old")
    # of a run that was killed
    (tmp_path / "file.partial").write_text("a longer text")
    with atomic_write(path) as partial:
        partial.write_text("new")
    assert (names(tmp_path), path.read_text()) == (["file"], "new")


def test_a_plot_without_matplotlib_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for refused in (
        lambda: prepare_results(tmp_path / "output"),
        lambda: save_plot(tmp_path / "plot.png", lambda axes: None),
    ):
        with pytest.raises(ValueError, match="is not installed: pip install matplotlib"):
            refused()
    assert list(tmp_path.iterdir()) == []


def test_only_a_segment_language_model_is_loaded(tmp_path):
    write_checkpoint(tmp_path / "xl.pt", "transformer_xl")
    assert load_checkpoint(tmp_path / "xl.pt")["optimizer_history"][-1]["num_updates"] == 1
    other = {"cfg": {"model": {"_name": "transformer_lm"}}}
    for name, content in (("'transformer_lm'", other), ("None", {"cfg": None}), ("None", [1])):
        torch.save(content, tmp_path / "other.pt")
        message = f"other.pt holds the model {name}, which is no segment language model"
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path / "other.pt")
