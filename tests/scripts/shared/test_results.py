import importlib.util

import pytest

from scripts._shared.results import prepare_results, save_plot


def test_plot_is_written_whole(tmp_path):
    path = tmp_path / "plot.png"
    save_plot(path, lambda axes: axes.plot([1, 2], [3, 4]))
    before = path.read_bytes()
    assert before.startswith(b"\x89PNG")
    with pytest.raises(ZeroDivisionError):
        save_plot(path, lambda axes: axes.plot([1 / 0]))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_plot_without_matplotlib_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for refused in (
        lambda: prepare_results(tmp_path / "output"),
        lambda: save_plot(tmp_path / "plot.png", lambda axes: None),
    ):
        with pytest.raises(ValueError, match="is not installed: pip install matplotlib"):
            refused()
    assert list(tmp_path.iterdir()) == []
