import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from scripts._shared.commands import ROOT, short
from scripts.quickstart import _steps as quickstart_steps

OPTIONS = ["--arch", "transformer", "--max-update", "90"]


def exactly(text):
    return f"^{re.escape(text)}$"


def training(folder, options=OPTIONS, log=None):
    return quickstart_steps.Training("some.py", folder, folder / "data", options, log)


@pytest.fixture
def ran(monkeypatch):
    """Commands that would have been run."""
    commands = []

    @contextmanager
    def pretend(words, log=None):
        commands.append(words)
        yield

    monkeypatch.setattr(quickstart_steps, "child_process", pretend)
    return commands


def test_training_goes_on_with_the_same_options_only(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    training(tmp_path).check_options()
    checkpoint = tmp_path / "checkpoints" / "checkpoint_last.pt"
    checkpoint.touch()
    training(tmp_path).check_options()

    changed = training(tmp_path, ["--lr", "1"])
    message = (
        f"{checkpoint} was trained with other options than TRAINING_OPTIONS of "
        f"scripts/some.py (see {tmp_path}/training.json): remove {checkpoint.parent} "
        "or give another folder with --output"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        changed.check_options()
    checkpoint.unlink()
    changed.check_options()
    assert json.loads((tmp_path / "training.json").read_text())["options"] == ["--lr", "1"]


def test_training_goes_on_in_a_folder_that_was_moved(tmp_path):
    place, moved = tmp_path / "place", tmp_path / "moved"
    (place / "checkpoints").mkdir(parents=True)
    training(place).check_options()
    place.rename(moved)
    (moved / "checkpoints" / "checkpoint_last.pt").touch()
    training(moved, log=moved / "log").check_options()


@pytest.mark.parametrize("log", [None, "train.log"])
def test_training_is_announced_and_run(tmp_path, ran, monkeypatch, capsys, log):
    monkeypatch.setattr(quickstart_steps.Training, "progress", lambda self: (80, 0.0))
    found = training(tmp_path, log=log and tmp_path / log)
    found.run(3, "an hour", "goes to {goal}")
    expected = [f"{tmp_path}/data", *OPTIONS, "--save-dir", f"{tmp_path}/checkpoints"]
    if log:
        expected += ["--log-file", f"{tmp_path}/{log}"]
    # a test's standard error is no terminal
    assert ran[0][1:] == [*expected, "--log-format", "simple", "--log-interval", "50"]
    assert Path(ran[0][0]).name == "fairseq-train"
    assert found.command(terminal=True)[1:] == expected
    title, command = capsys.readouterr().out.split("\n$ ")
    assert title == (
        "\n[3] training: an hour, 80 of 90 updates done; fairseq's bar\n    goes to 90"
    )
    assert shlex.split(command.replace("\\\n", "")) == ran[0]


@pytest.mark.parametrize(("missing", "commands"), [(1, 1), (0, 0)])
def test_training_is_passed_over_once_done(tmp_path, ran, monkeypatch, capsys, missing, commands):
    monkeypatch.setattr(quickstart_steps.Training, "progress", lambda self: (90 - missing, 0.0))
    training(tmp_path).run(3, "an hour", "fills")
    assert len(ran) == commands
    done = "[3] training: 90 of 90 updates done, nothing left to do"
    assert (done in capsys.readouterr().out) == (commands == 0)


def test_progress_of_a_model_of_parsed_arguments_is_read(tmp_path):
    checkpoint = training(tmp_path).checkpoint
    checkpoint.parent.mkdir()
    assert training(tmp_path).progress() == (0, 0.0)
    history = {"optimizer_history": [{"num_updates": 7}]}
    told = {"extra_state": {"previous_training_time": 1.5}}
    torch.save({**history, **told, "cfg": {"model": argparse.Namespace(dropout=0)}}, checkpoint)
    # in a process that has not imported the plugin, which allows all containers of options
    code = (
        "from pathlib import Path; from scripts.quickstart._steps import Training; "
        "folder = Path('.'); "
        "print(Training('some.py', folder, folder, []).progress())"
    )
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(7, 1.5)\n", "")


def test_checkpoint_that_was_cut_short_is_not_trained_on(tmp_path, ran, capsys):
    checkpoint = training(tmp_path).checkpoint
    checkpoint.parent.mkdir()
    checkpoint.write_bytes(b"PK")
    training(tmp_path).run(3, "an hour", "fills")
    assert not checkpoint.exists()
    assert "training: an hour, 0 of 90 updates done" in capsys.readouterr().out


def test_output_of_a_logged_command_is_returned_and_kept(tmp_path):
    code = "import sys; print(sys.stdin.read()); print('error', file=sys.stderr)"
    log = tmp_path / "log"
    output = quickstart_steps.run_logged([sys.executable, "-c", code], log, "test", sent="d \u2581")
    assert sorted(output.split()) == ["d", "error", "\u2581"]
    assert log.read_text(encoding="utf-8") == output


def test_command_that_fails_is_refused(tmp_path):
    message = (
        f"{Path(sys.executable).name} ended with exit status 3: remove the cause named by its "
        f"messages in {tmp_path}/log and run the same command again"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        quickstart_steps.run_logged([sys.executable, "-c", "exit(3)"], tmp_path / "log", "test")


def run(steps, output):
    arguments = ["--output", str(output)]
    return quickstart_steps.run_quickstart(
        steps, "python -m scripts.some", Path("x"), "some", arguments
    )


def test_steps_get_a_new_working_folder(tmp_path):
    folders = []
    assert run(folders.append, tmp_path / "a" / "b") == 0
    assert folders == [tmp_path / "a" / "b"]
    assert (tmp_path / "a" / "b" / "checkpoints").is_dir()


def test_ctrl_c_tells_how_to_go_on(tmp_path, capsys):
    def interrupt(output):
        raise KeyboardInterrupt

    assert run(interrupt, tmp_path / "quickstart") == 130
    assert capsys.readouterr().out == (
        "\ninterrupted (a traceback above is fairseq's way to stop); "
        "`make some` goes on from the last checkpoint\n"
    )


def test_what_is_in_the_way_is_told(tmp_path, capsys):
    def fail(output):
        raise ValueError("--option 3: give 4")

    assert run(fail, tmp_path) == 1
    assert capsys.readouterr().err == "error: --option 3: give 4\n"


def test_place_without_write_access_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(None, tmp_path / "file" / "quickstart") == 1
    assert capsys.readouterr().err == (
        f"error: --output {tmp_path}/file/quickstart cannot be written (Not a directory): "
        "give a folder in a place where you may write\n"
    )


@pytest.mark.parametrize("command", ["language_model", "translation"])
def test_the_makefile_runs_the_script_as_ctrl_c_says(command, monkeypatch):
    script = importlib.import_module(f"scripts.quickstart.{command}")
    given = []
    monkeypatch.setattr(script, "run_quickstart", lambda *all: given.append(all))
    script.main()
    steps, description, folder, name, _ = given[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n{name}: set-up\n\t@.venv/bin/python -m scripts.quickstart.{command}\n" in makefile
    assert f"python -m scripts.quickstart.{command} [--output {short(folder)}]" in description
    assert steps is script.quickstart
