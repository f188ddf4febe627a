"""Results are not measured if they could not be drawn."""

import importlib.util

import pytest

from scripts._shared.results import prepare_results, save_plot


def test_a_plot_without_matplotlib_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for refused in (
        lambda: prepare_results(tmp_path / "output"),
        lambda: save_plot(tmp_path / "plot.png", lambda axes: None),
    ):
        with pytest.raises(ValueError, match="is not installed: pip install matplotlib"):
            refused()
    assert list(tmp_path.iterdir()) == []
