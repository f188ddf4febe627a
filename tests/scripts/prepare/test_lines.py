import gzip
import multiprocessing
import os
import re
import select
import signal
from functools import partial

import pytest

from scripts.prepare import _lines
from scripts.prepare._lines import in_processes, map_lines, read_lines


def same_lines():
    return list


def cut_lines():
    return lambda lines: [line.replace(" ", "\n") for line in lines]


def end_process():
    return lambda lines: os.kill(os.getpid(), signal.SIGKILL)


def hold(fifo):
    held = fifo.open("wb")
    return lambda lines: (held, lines)[1]


def wait_for_work(fifo):
    results = in_processes(["a"], partial(hold, fifo), 2)
    next(results)
    signal.pause()


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_lines_of_a_file(tmp_path, name):
    path = tmp_path / name
    content = "\ufeffa b\r\n\n\u2028c\rd\n\u00e9".encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert list(read_lines(path)) == ["a b", "", "\u2028c\rd", "\u00e9"]


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_line_that_is_no_utf8_is_named(tmp_path, name):
    path = tmp_path / name
    content = b"a\nb\nca\xe9f\n"
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    where = re.escape(f"{path}, line 3: byte 3 of the line is no UTF-8 (invalid continuation")
    with pytest.raises(ValueError, match=rf"^{where}.*\): convert the file to UTF-8 or mend"):
        list(read_lines(path))


@pytest.mark.parametrize("content", [gzip.compress(b"a\n" * 999, mtime=0)[:-9], b"plain\n"])
def test_damaged_compressed_file_is_named(tmp_path, content):
    path = tmp_path / "text.gz"
    path.write_bytes(content)
    message = rf"^{re.escape(str(path))}, after line \d+: the file is truncated, damaged or not"
    with pytest.raises(ValueError, match=message):
        list(read_lines(path))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/no cannot be read \(No such file.*\): give"
    ):
        next(read_lines(tmp_path / "no"))


def test_lines_are_read_only_a_few_chunks_ahead(monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 2)
    read = []
    lines = (read.append(number) or str(number) for number in range(1000))
    results = in_processes(lines, same_lines, 2)
    assert next(results) == ["0", "1"]
    assert len(read) <= 2 * (2 * _lines.AHEAD + 1)
    results.close()


@pytest.mark.parametrize("expected", [1, 3])
def test_another_number_of_lines_is_refused(tmp_path, expected):
    target = tmp_path / "target"
    message = rf"^copy, {target}: 2 lines, the text has {expected}: leave it as it"
    with pytest.raises(ValueError, match=message):
        map_lines(["a", "b"], {"lines": expected}, target, same_lines, 1, "copy")


def test_line_that_becomes_two_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^cut, .*: 3 lines, the text has 2: leave it as it is"):
        map_lines(["a b", "c"], {"lines": 2}, tmp_path / "target", cut_lines, 1, "cut")


@pytest.mark.parametrize("workers", [1, 2])
def test_failure_while_reading_leaves_no_file(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(_lines, "CHUNK", 1)
    (tmp_path / "text").write_bytes(b"a\n" * 30 + b"\xff\n")
    lines, target = read_lines(tmp_path / "text"), tmp_path / "target"
    with pytest.raises(ValueError, match="text, line 31: byte 1 of the line is no UTF-8"):
        map_lines(lines, {"lines": 31}, target, same_lines, workers, "copy")


def test_killed_process_is_told(tmp_path):
    message = "^--workers 2: one of the processes was ended from outside, .*want of memory: give"
    with pytest.raises(ValueError, match=message):
        map_lines(["a"], {"lines": 1}, tmp_path / "target", end_process, 2, "end")


def test_processes_end_with_the_one_that_is_killed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = multiprocessing.get_context("fork").Process(target=wait_for_work, args=(fifo,))
    script.start()
    with fifo.open("rb") as held_by_processes:
        script.kill()
        script.join()
        assert select.select([held_by_processes], [], [], 60)[0]
        assert held_by_processes.read() == b""
