import contextlib
import json
import os
import re
from pathlib import Path

import pytest

from scripts.prepare._steps import Steps, made_whole


class Chain:
    """Steps a, b of a, and folder c of b, which count how often they work."""

    def __init__(self, output, **options):
        self.output = output
        self.options = {"size": 1, "tool": "x", **options}
        self.worked = []

    def write(self, name, text):
        def work(target):
            assert not target.exists()
            self.worked.append(name)
            target.write_text(text)
            return {"length": len(text)}

        return work

    def run(self, fail=None, error=ValueError):
        steps = Steps(self.output, "news")
        size, tool = {"size": self.options["size"]}, {"tool": self.options["tool"]}

        def folder(target):
            self.worked.append("c")
            target.mkdir()
            (target / "one").write_text("1")
            if fail == "c":
                raise error
            return 7

        def failing(target):
            target.write_text("half")
            raise error

        works = {"x/a": self.write("a", "A" * size["size"]), "b": self.write("b", "B")}
        works = {name: failing if name == fail else work for name, work in works.items()}
        first = steps.run("x/a", size, [], works["x/a"])
        second = steps.run("b", tool, ["x/a"], works["b"])
        return first, second, steps.run("c", {}, ["b"], folder)


def files(output):
    return {
        path.relative_to(output).as_posix(): path.read_text()
        for path in output.rglob("*")
        if path.is_file() and path.name != "steps.json"
    }


@pytest.fixture
def done(tmp_path):
    output = tmp_path / "out"
    assert Chain(output).run() == ({"length": 1}, {"length": 1}, 7)
    assert files(output) == {"x/a": "A", "b": "B", "c/one": "1"}
    return output


def test_steps_are_done_once(done, capsys):
    again = Chain(done)
    capsys.readouterr()
    assert again.run() == ({"length": 1}, {"length": 1}, 7)
    assert again.worked == []
    assert capsys.readouterr().out == "x/a: complete\nb: complete\nc: complete\n"


def test_another_option_is_refused_and_names_what_to_remove(done):
    before = files(done)
    message = (
        f"--output {done}: b was made with another --tool (x, now y): give another folder, or "
        f"remove {done}/b to have this and what depends on it made again"
    )
    changed = Chain(done, tool="y")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        changed.run()
    assert (changed.worked, files(done)) == ([], before)
    (done / "b").unlink()
    changed.run()
    assert changed.worked == ["b", "c"]


def test_all_that_has_the_option_is_named(tmp_path):
    chain = Chain(tmp_path / "out")
    for size in (1, 2):
        steps = Steps(chain.output, "news")
        for name in ("a", "b"):
            if size == 1:
                steps.run(name, {"size": size}, [], chain.write(name, name))
            else:
                with pytest.raises(ValueError, match=rf"remove {tmp_path}/out/a, {tmp_path}/out/b"):
                    steps.run(name, {"size": size}, [], chain.write(name, name))


def test_removed_file_is_made_again_and_what_it_changes(done):
    (done / "x" / "a").unlink()
    same = Chain(done)
    same.run()
    # what is made of the same is the same
    assert same.worked == ["a"]
    (done / "x" / "a").unlink()
    larger = Chain(done, size=2)
    larger.run()
    assert larger.worked == ["a", "b", "c"]
    assert files(done)["x/a"] == "AA"


def test_file_that_was_cut_short_is_made_again(done):
    (done / "x" / "a").write_text("")
    (done / "c" / "one").unlink()
    chain = Chain(done)
    chain.run()
    assert chain.worked == ["a", "c"]


@pytest.mark.parametrize("error", [ValueError("why"), OSError("why"), KeyboardInterrupt("why")])
@pytest.mark.parametrize(("fail", "left"), [("x/a", []), ("b", ["x/a"]), ("c", ["b", "x/a"])])
def test_failure_leaves_what_is_whole_and_the_next_run_goes_on(tmp_path, error, fail, left):
    output = tmp_path / "out"
    with pytest.raises(type(error), match=r"^why$"):
        Chain(output).run(fail, error)
    assert output.exists() == bool(left)
    assert sorted(files(output)) == left
    again = Chain(output)
    again.run()
    assert again.worked == ["a", "b", "c"][len(left) :]
    assert files(output) == {"x/a": "A", "b": "B", "c/one": "1"}


def test_failure_does_not_remove_a_folder_that_was_there(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").mkdir()
    with pytest.raises(ValueError, match="does not hold prepared news: remove it or give another"):
        Chain(tmp_path / "out").run()
    assert (tmp_path / "out" / "x").is_dir()


def test_rest_of_a_killed_run_is_replaced(done):
    # killed at work, and between the renaming of a file and its record
    (done / "c.partial").mkdir()
    (done / "c.partial" / "stray").touch()
    records = json.loads((done / "steps.json").read_text())
    del records["steps"]["c"]
    (done / "steps.json").write_text(json.dumps(records))
    (done / "c" / "stray").touch()
    chain = Chain(done)
    chain.run()
    assert chain.worked == ["c"]
    assert files(done) == {"x/a": "A", "b": "B", "c/one": "1"}


def test_what_a_killed_runs_child_writes_late_is_removed(tmp_path):
    with made_whole(tmp_path / "bin") as folder:
        folder.mkdir()
        # by a child that has not ended yet, whose folder was not there at first
        (tmp_path / "bin.partial-1").mkdir()
        (tmp_path / "bin.partial-1" / "dict.txt").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_old_record_is_gone_before_a_step_is_made_again(done):
    (done / "b").unlink()
    with pytest.raises(ValueError, match="why"):
        Chain(done, tool="y").run("b", ValueError("why"))
    assert "b" not in json.loads((done / "steps.json").read_text())["steps"]


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"preparation": "else", "steps": {}}'])
def test_folder_with_something_else_is_refused(tmp_path, content):
    output = tmp_path / "out"
    output.mkdir()
    (output / ("other" if content is None else "steps.json")).write_text(content or "")
    message = f"^--output {output} exists and does not hold prepared news: remove it or give"
    with pytest.raises(ValueError, match=message):
        Chain(output).run()


def test_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(ValueError, match="exists and does not hold prepared news"):
        Steps(tmp_path / "out", "news")


@pytest.mark.parametrize("left", [[], ["steps.json.partial-99999999"]])
def test_folder_that_nobody_has_claimed_is_used(tmp_path, left):
    output = tmp_path / "out"
    output.mkdir()
    for name in left:
        (output / name).touch()
    Chain(output).run()
    assert {path.name for path in output.iterdir()} == {"x", "b", "c", "steps.json"}


@pytest.mark.parametrize(
    "at", ["before its work", "before its file has its name", "before its record"]
)
def test_run_killed_in_its_first_step_is_gone_on_with(tmp_path, monkeypatch, at):
    output = tmp_path / "out"
    save, die = Steps._save, lambda *given: os._exit(9)
    child = os.fork()
    if child == 0:
        # as kill -9 does: nothing is put in order
        chain = Chain(output)
        if at == "before its work":
            monkeypatch.setattr(chain, "write", lambda name, text: die)
        elif at == "before its file has its name":
            monkeypatch.setattr(Path, "rename", die)
        else:
            monkeypatch.setattr(Steps, "_save", lambda self: die() if self.records else save(self))
        with contextlib.suppress(BaseException):
            chain.run()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    Chain(output).run()
    assert files(output) == {"x/a": "A", "b": "B", "c/one": "1"}


@pytest.mark.parametrize("name", ["x.partial-notes/text", "steps.json.partial-old", "raw/text"])
def test_files_of_others_stay(tmp_path, name):
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(ValueError, match="does not hold prepared news: remove it or give another"):
        Chain(tmp_path / "out").run()
    assert path.read_text() == "mine"


def test_a_link_in_a_folder_is_something(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="does not hold prepared news: remove it or give another"):
        Chain(tmp_path / "out").run()
