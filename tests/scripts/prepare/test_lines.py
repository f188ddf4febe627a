"""Lines of texts, and worker processes for them."""

import pytest

from scripts.prepare import _lines
from scripts.prepare._lines import in_processes, read_lines, write_lines
from tests.scripts.prepare.prepared import write_files


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_lines_end_with_newlines_alone(tmp_path, name):
    write_files(tmp_path, {name: "\ufeffa b\r\n\n\u2028c\rd\n\u00e9"})
    assert list(read_lines(tmp_path / name)) == ["a b", "", "\u2028c\rd", "\u00e9"]


def same_lines():
    return list


def test_lines_keep_their_order_and_are_read_only_a_little_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 2)
    begun = []
    lines = (begun.append(number) or f"{number} x" for number in range(100))
    results = in_processes(lines, 2, same_lines)
    assert next(results) == ["0 x", "1 x"]
    assert len(begun) <= 2 * 2 * _lines.AHEAD
    results.close()
    lines = [f"{number} x" for number in range(100)]
    sizes = write_lines([*lines, ""], tmp_path / "target", 2, same_lines)
    assert sizes == {"lines": 101, "words": 200}
    assert (tmp_path / "target").read_text() == "\n".join([*lines, "", ""])
