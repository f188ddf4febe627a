"""Stages of a preparation, reading lines, and the processes that work on them."""

import json
import multiprocessing
import os
import re
import select
import signal
from functools import partial

import pytest

from scripts._shared.command_line import exit_status
from scripts.prepare import _lines
from scripts.prepare._lines import in_processes, read_lines, write_lines
from scripts.prepare._stages import Stages
from tests.scripts.prepare.prepared import write_files


def write(content):
    return lambda folder: (folder / "file").write_text(content)


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "full"), 1), (KeyboardInterrupt, 130)])
def test_a_stopped_stage_leaves_nothing_and_starts_again(tmp_path, capsys, error, status):
    out = tmp_path / "out"

    def stop(folder):
        write("half")(folder)
        raise error

    def prepare(second):
        stages = Stages(out, {"a": 1})
        assert stages.run("first", write("one")) == 3
        assert stages.run("second", second, {"b": 2}) == 5
        stages.finish({"found": True})

    assert exit_status(lambda: Stages(out, {}).run("first", stop), output=out) == status
    assert not out.exists()
    assert exit_status(lambda: prepare(stop), output=out) == status
    assert [path.name for path in out.iterdir()] == ["first"]
    # of a run that was killed
    (out / "second.partial-1").mkdir()
    capsys.readouterr()
    assert exit_status(lambda: prepare(write("three")), output=out) == 0
    assert capsys.readouterr().out.startswith("first: complete\nsecond: at work\n")
    assert (out / "second" / "file").read_text() == "three"
    assert not list(out.glob("*.partial-*"))
    found = json.loads((out / "preparation.json").read_text())
    assert found == {"a": 1, "b": 2, "found": True}


def test_another_option_names_what_to_remove(tmp_path):
    def prepare(second=2, third=(3, None)):
        stages = Stages(tmp_path, {"a": 1})
        stages.run("first", write("x"))
        stages.run("second", write("x"), {"b": second})
        stages.run("third", write("x"), {"c": third})

    prepare()
    prepare()
    for changes, named, stale in (
        ({"second": 5}, "second was made with another --b (2, now 5)", ("second", "third")),
        ({"third": (4, 5)}, "third was made with another --c ([3, None], now [4, 5])", ("third",)),
    ):
        folders = ", ".join(f"{tmp_path}/{name}" for name in stale)
        message = f"{named}: give another folder, or remove {folders} to"
        with pytest.raises(ValueError, match=re.escape(message)):
            prepare(**changes)
    # of something else
    (tmp_path / "bin").mkdir()
    with pytest.raises(ValueError, match="bin in it was not made by this command: remove it"):
        Stages(tmp_path, {}).run("bin", write("x"))
    assert not list((tmp_path / "bin").iterdir())


@pytest.mark.parametrize("name", ["text", "text.gz"])
def test_lines_of_a_file(tmp_path, name):
    write_files(tmp_path, {name: "\ufeffa b\r\n\n\u2028c\rd\n\u00e9"})
    assert list(read_lines(tmp_path / name)) == ["a b", "", "\u2028c\rd", "\u00e9"]


def same_lines():
    return list


def end_process():
    return lambda lines: os.kill(os.getpid(), signal.SIGKILL)


def hold(fifo):
    held = fifo.open("wb")
    return lambda lines: (held, lines)[1]


def wait_for_work(fifo):
    results = in_processes(["a"], partial(hold, fifo), 2)
    next(results)
    signal.pause()


def test_lines_keep_their_order_and_are_read_only_a_little_ahead(tmp_path, monkeypatch):
    monkeypatch.setattr(_lines, "CHUNK", 2)
    read = []
    lines = (read.append(number) or f"{number} x" for number in range(100))
    results = in_processes(lines, same_lines, 2)
    assert next(results) == ["0 x", "1 x"]
    assert len(read) <= 2 * 2 * _lines.AHEAD
    results.close()
    lines = [f"{number} x" for number in range(100)]
    sizes = write_lines([*lines, ""], tmp_path / "target", same_lines, 2, "copy")
    assert sizes == {"lines": 101, "words": 200}
    assert (tmp_path / "target").read_text() == "\n".join([*lines, "", ""])


def test_a_killed_process_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"^--workers 2: one of the processes"):
        write_lines(["a"], tmp_path / "target", end_process, 2, "end")


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
