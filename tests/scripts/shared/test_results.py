import importlib.util
import re

import pytest

from scripts._shared.results import (
    NO_MATPLOTLIB,
    check_plotting,
    prepare_results,
    save_plot,
)


def test_plot_is_written_whole(tmp_path):
    path = tmp_path / "plot.png"
    save_plot(path, lambda axes: axes.plot([1, 2], [3, 4]))
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        save_plot(path, lambda axes: axes.plot([1 / 0]))
    with pytest.raises(OSError, match="nowhere"):
        save_plot(tmp_path / "nowhere" / "plot.png", lambda axes: axes.plot([1, 2]))
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_a_plot_without_matplotlib_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for refused in (
        check_plotting,
        lambda: prepare_results(tmp_path / "output"),
        lambda: save_plot(tmp_path / "plot.png", lambda axes: None),
    ):
        with pytest.raises(ValueError, match=re.escape(NO_MATPLOTLIB)):
            refused()
    assert list(tmp_path.iterdir()) == []
    assert "pip install matplotlib" in NO_MATPLOTLIB
