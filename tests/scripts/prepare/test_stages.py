"""A finished stage is passed over, an interrupted one begins anew."""

import json
import re

import pytest

from scripts._shared.command_line import exit_status
from scripts.prepare._stages import Stages


def write(content, folder):
    return (folder / "file").write_text(content)


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "full"), 1), (KeyboardInterrupt, 130)])
def test_a_stopped_stage_leaves_nothing_and_starts_again(tmp_path, capsys, error, status):
    out = tmp_path / "out"

    def stop(content, folder):
        write(content, folder)
        raise error

    def prepare(second):
        stages = Stages(out, {"a": 1})
        assert stages.run("first", write, "one") == 3
        assert stages.run("second", second, "three", settings={"b": 2}) == 5
        stages.finish({"size": 3})

    assert exit_status(lambda: Stages(out, {}).run("first", stop, "half"), output=out) == status
    assert not out.exists()
    assert exit_status(lambda: prepare(stop), output=out) == status
    assert [path.name for path in out.iterdir()] == ["first"]
    # left by a killed run
    (out / "second.partial-1").mkdir()
    capsys.readouterr()
    assert exit_status(lambda: prepare(write), output=out) == 0
    assert capsys.readouterr().out.startswith("first: complete\nsecond: at work\n")
    assert (out / "second" / "file").read_text() == "three"
    assert not list(out.glob("*.partial-*"))
    description = json.loads((out / "preparation.json").read_text())
    assert description == {"a": 1, "b": 2, "size": 3}


def test_another_option_names_what_to_remove(tmp_path):
    def prepare(second=2, third=(3, None)):
        stages = Stages(tmp_path, {"a": 1})
        stages.run("first", write, "x")
        stages.run("second", write, "x", settings={"b": second})
        stages.run("third", write, "x", settings={"c": third})

    prepare()
    prepare()
    for changes, option, stale in (
        ({"second": 5}, "--b", ("second", "third")),
        ({"third": (4, 5)}, "--c", ("third",)),
    ):
        folders = ", ".join(f"{tmp_path}/{name}" for name in stale)
        with pytest.raises(ValueError, match=f"{option} .*remove {re.escape(folders)} to"):
            prepare(**changes)
    # made by something else
    (tmp_path / "bin").mkdir()
    with pytest.raises(ValueError, match=r"--output .*: bin in it was not made by this command"):
        Stages(tmp_path, {}).run("bin", write, "x")
    assert not list((tmp_path / "bin").iterdir())
