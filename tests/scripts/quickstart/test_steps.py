import argparse
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from scripts._shared.commands import ROOT, short
from scripts.quickstart import _steps as quickstart_steps

SCALES = {"training": 1.0, "validation": 1.0}
OPTIONS = ["--arch", "transformer", "--max-update", "90"]
TRAINED = (
    '2026-01-01 | INFO | train_inner | {"epoch": 1, "loss": "%s", "num_updates": "%s", "wall": "9"}'
)
VALIDATED = (
    '2026-01-01 | INFO | valid | {"epoch": 1, "valid_loss": "9", "valid_nll_loss": "%s", '
    '"valid_num_updates": "%s"}'
)


def exactly(text):
    return f"^{re.escape(text)}$"


def training(folder, options=OPTIONS):
    return quickstart_steps.Training("some.py", folder, options)


@pytest.fixture
def ran(monkeypatch):
    """Commands that would have been run, each with what was in the log before."""
    commands = []

    @contextmanager
    def pretend(words, log=None, append=False):
        commands.append(words)
        with log.open("a" if append else "w", encoding="utf-8") as written:
            written.write("no figures\n" + TRAINED % (4.0, 90) + "\n" + VALIDATED % (2.0, 90))
            written.write("\n")
        yield SimpleNamespace(poll=lambda: 0)

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
        f"{checkpoint} was trained with another dictionary, or with other options than "
        f"TRAINING_OPTIONS of scripts/some.py (see {tmp_path}/training.json): remove {tmp_path} "
        "or give another folder with --output"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        changed.check_options()
    # units that another Python's text has
    dictionary = training(tmp_path).data / "dict.txt"
    dictionary.parent.mkdir(parents=True)
    dictionary.write_text("def 1\n")
    with pytest.raises(ValueError, match=exactly(message)):
        training(tmp_path).check_options()
    checkpoint.unlink()
    changed.check_options()
    assert json.loads((tmp_path / "training.json").read_text())["options"] == ["--lr", "1"]


def test_training_goes_on_in_a_folder_that_was_moved(tmp_path):
    place, moved = tmp_path / "place", tmp_path / "moved"
    (place / "checkpoints").mkdir(parents=True)
    training(place).check_options()
    place.rename(moved)
    (moved / "checkpoints" / "checkpoint_last.pt").touch()
    training(moved).check_options()


def test_training_is_announced_run_and_shown(tmp_path, ran, monkeypatch, capsys):
    monkeypatch.setattr(quickstart_steps.Training, "progress", lambda self: (80, 0.0))
    # of an earlier part of the training: kept, and not shown again
    (tmp_path / "train.log").write_text(TRAINED % (9.0, 80) + "\n")
    scales = {"training": 0.25, "validation": 0.5}
    training(tmp_path).run("[3] training: an hour", "bits a character", scales)
    ((name, *words),) = ran
    assert Path(name).name == "fairseq-train"
    expected = [f"{tmp_path}/data/bin", *OPTIONS, "--save-dir", f"{tmp_path}/checkpoints"]
    assert words == [*expected, "--log-format", "json", "--log-interval", "1"]
    title, rest = capsys.readouterr().out.split("\n$ ")
    assert title == "\n[3] training: an hour, 80 of 90 updates done"
    command, shown = rest.split("\nfairseq's log: ")
    assert shlex.split(command.replace("\\\n", "")) == ran[0]
    assert re.sub(r" +\d+ s", " 0 s", shown) == (
        f"{tmp_path}/train.log\n100 %, 0 s: training 1.000, validation 1.000 bits a character\n"
    )
    assert (tmp_path / "train.log").read_text().startswith(TRAINED % (9.0, 80))


def test_a_log_is_followed_while_it_is_written(tmp_path, monkeypatch, capsys):
    # half a line, and the rest of it later; one that another process reads too early is waited for
    code = (
        "import sys, time\n"
        f"for part in ({TRAINED % (4.0, 9)!r}[:70], {TRAINED % (4.0, 9)!r}[70:] + chr(10)):\n"
        "    print(part, end='', flush=True)\n"
        "    time.sleep(0.5)\n"
    )
    monkeypatch.setattr(
        quickstart_steps.Training, "command", lambda self: [sys.executable, "-c", code]
    )
    # of a training that was stopped before its first checkpoint: not of this one
    (tmp_path / "train.log").write_text(TRAINED % (9.0, 80) + "\n")
    (tmp_path / "checkpoints").mkdir()
    training(tmp_path).run("[3] training")
    assert " 10 %," in capsys.readouterr().out
    assert (tmp_path / "train.log").read_text() == TRAINED % (4.0, 9) + "\n"


def test_a_terminal_shows_a_bar(monkeypatch, capsys):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    shown = quickstart_steps.Progress(50, 100, "bits", SCALES)
    shown.read(VALIDATED % (2.5, 75))
    shown.bar.close()
    assert capsys.readouterr().out == ""
    assert "training:  50%" in terminal.getvalue()
    assert re.search(r"training:  75%.* 75/100 .*validation 2\.500 bits\]", terminal.getvalue())


def test_a_line_is_printed_every_tenth_part(capsys):
    shown = quickstart_steps.Progress(0, 200, "bits", SCALES)
    for updates in range(5, 205, 5):
        shown.read(TRAINED % (1.5, updates))
    shown.tell()
    parts = re.findall(r"^ *(\d+) %, +\d+ s: training 1\.500 bits$", capsys.readouterr().out, re.M)
    assert list(map(int, parts)) == list(range(10, 110, 10))


@pytest.mark.parametrize(("missing", "commands"), [(1, 1), (0, 0)])
def test_training_is_passed_over_once_done(tmp_path, ran, monkeypatch, capsys, missing, commands):
    monkeypatch.setattr(quickstart_steps.Training, "progress", lambda self: (90 - missing, 0.0))
    training(tmp_path).run("[3] training")
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
        "print(Training('some.py', Path('.'), []).progress())"
    )
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(7, 1.5)\n", "")


def checkpoint(folder, name, updates):
    torch.save({"updates": updates}, folder / name)


@pytest.mark.parametrize("last", ["whole", "cut short", "missing"])
def test_the_newest_whole_checkpoint_takes_the_place_of_a_broken_last_one(tmp_path, capsys, last):
    checkpoint(tmp_path, "checkpoint_1_100.pt", 100)
    checkpoint(tmp_path, "checkpoint_1_25.pt", 25)
    checkpoint(tmp_path, "checkpoint_last.pt", 75)
    whole = (tmp_path / "checkpoint_1_100.pt").read_bytes()
    broken = ["checkpoint_best.pt", "checkpoint_2_125.pt"]
    if last != "whole":
        broken.append("checkpoint_last.pt")
    for name in broken:
        (tmp_path / name).write_bytes(whole[:-1])
    if last == "missing":
        (tmp_path / broken.pop()).unlink()
    (tmp_path / "checkpoint_last.pt.tmp").touch()
    quickstart_steps.repair_checkpoints(tmp_path)
    found = {path.name: torch.load(path)["updates"] for path in tmp_path.iterdir()}
    assert found == {
        "checkpoint_1_100.pt": 100,
        "checkpoint_1_25.pt": 25,
        "checkpoint_last.pt": 75 if last == "whole" else 100,
    }
    said = [f"removed {short(tmp_path / name)}: it was cut short" for name in broken]
    if last != "whole":
        said.append("checkpoint_1_100.pt is the last checkpoint now")
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(said)


def test_checkpoint_that_was_cut_short_is_not_trained_on(tmp_path, ran, capsys):
    broken = training(tmp_path).checkpoint
    broken.parent.mkdir()
    broken.write_bytes(b"PK")
    training(tmp_path).run("[3] training: an hour")
    assert not broken.exists()
    printed = capsys.readouterr().out
    assert f"removed {broken}: it was cut short\n" in printed
    assert "training: an hour, 0 of 90 updates done" in printed


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


def test_a_checkpoint_that_holds_more_than_weights_is_not_loaded(tmp_path):
    path = training(tmp_path).checkpoint
    path.parent.mkdir()
    torch.save({"extra_state": Path}, path)
    message = (
        f"{path} holds more than weights and options and is not loaded: remove {tmp_path} or give "
        "another folder with --output"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        training(tmp_path).progress()


def test_two_quickstarts_do_not_share_a_folder(tmp_path, capsys):
    assert run(lambda output: run(None, output) == 1 or pytest.fail("not refused"), tmp_path) == 0
    assert capsys.readouterr().err == (
        f"error: another quickstart is running in {tmp_path}: wait for its end, or give another "
        "folder with --output\n"
    )
    assert run(lambda output: None, tmp_path) == 0


def test_ctrl_c_tells_how_to_go_on(tmp_path, capsys):
    def interrupt(output):
        raise KeyboardInterrupt

    assert run(interrupt, tmp_path / "quickstart") == 130
    said = "\ninterrupted; `make some` goes on from the last checkpoint\n"
    assert capsys.readouterr().err == said


def test_place_without_write_access_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert run(None, tmp_path / "file" / "quickstart") == 1
    assert capsys.readouterr().err == (
        f"error: --output {tmp_path}/file/quickstart cannot be written (Not a directory): "
        "give a folder in a place where you may write\n"
    )


@pytest.mark.parametrize("command", ["language_model", "translation"])
def test_the_makefile_runs_the_command_as_ctrl_c_says(command, monkeypatch):
    script = importlib.import_module(f"scripts.quickstart.{command}")
    given = []
    monkeypatch.setattr(script, "run_quickstart", lambda *all: given.append(all))
    script.main()
    steps, description, folder, name, _ = given[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"\n{name}: set-up\n\t@.venv/bin/python -m scripts.quickstart.{command}\n" in makefile
    assert f"python -m scripts.quickstart.{command} [--output {short(folder)}]" in description
    assert steps is script.quickstart
