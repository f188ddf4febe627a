"""scripts/set_up.py: its checks, its ways to fail, and when it builds .venv anew."""

import ast
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from scripts import set_up

ROOT = Path(__file__).resolve().parents[2]
PINS = set_up.read_pins(ROOT)
WAITING = "Another set-up of this .venv is running; waiting for it to end.\n"


class FakeRun:
    """Takes the place of `run`: records the commands, and makes a .venv when asked for one."""

    def __init__(self, fail_at=None, failure=(1, "")):
        self.commands = []
        self.fail_at = fail_at
        self.failure = failure

    def __call__(self, command):
        self.commands.append(command)
        if len(self.commands) == self.fail_at:
            if isinstance(self.failure, BaseException):
                raise self.failure
            return self.failure
        if "venv" in command:
            make_python(Path(command[-1]))
        return 0, ""

    @property
    def made_venv(self):
        return any("venv" in command for command in self.commands)


def make_python(venv, script="exit 0"):
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)


@pytest.fixture
def checkout(tmp_path):
    """A copy of what set-up reads."""
    root = (tmp_path / "checkout").resolve()
    for name in ("scripts/set_up.py", "requirements/development.txt"):
        (root / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def built(checkout):
    """A checkout with a complete .venv."""
    set_up.set_up(checkout, FakeRun())
    return checkout


def start(checkout, **environment):
    """Starts the script itself in a checkout."""
    return subprocess.Popen(
        [sys.executable, "scripts/set_up.py"],
        cwd=checkout,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# What is checked first.


@pytest.mark.parametrize(
    ("version", "name"), [((2, 7, 18), "2.7"), ((3, 9, 0), "3.9"), ((3, 14, 0), "3.14")]
)
def test_unsupported_python(version, name):
    assert set_up.python_problem(version) == (
        f"Python 3.10 to 3.13 is needed and this is Python {name}: install one of those and name "
        "it, for example `make test PYTHON=python3.11`."
    )


@pytest.mark.parametrize("version", [(3, 10, 0), (3, 11, 7), (3, 13, 9)])
def test_supported_python(version):
    assert set_up.python_problem(version) is None


def test_old_pythons_can_parse_it():
    newer = (
        ast.JoinedStr,
        ast.AnnAssign,
        ast.NamedExpr,
        ast.Nonlocal,
        ast.YieldFrom,
        ast.AsyncFunctionDef,
        ast.Match,
    )
    tree = ast.parse((ROOT / "scripts" / "set_up.py").read_text(encoding="ascii"))
    for node in ast.walk(tree):
        assert not isinstance(node, newer), f"line {node.lineno}"
        if isinstance(node, ast.FunctionDef):
            annotations = [argument.annotation for argument in node.args.args]
            assert not any([node.returns, node.args.kwonlyargs, *annotations]), node.name
        if isinstance(node, ast.Raise):
            assert node.cause is None, f"line {node.lineno}"


@pytest.mark.parametrize(
    ("present", "language", "names"),
    [([], "C", "cc nor gcc"), (["gcc"], "C++", "c++ nor g++")],
)
def test_no_compiler(checkout, tmp_path, present, language, names):
    path = tmp_path / "bin"
    path.mkdir()
    for name in present:
        (path / name).touch(mode=0o755)
    process = start(checkout, PATH=str(path))
    assert process.communicate() == (
        "",
        f"A {language} compiler is needed and neither {names} is on PATH: install one "
        "(Debian/Ubuntu: apt install g++; macOS: xcode-select --install).\n",
    )
    assert process.returncode == 1
    assert not (checkout / ".venv").exists()


def test_no_python_headers(monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    version = "{}.{}".format(*sys.version_info)
    assert set_up.headers_problem() == (
        "Python's headers are needed and /nowhere/Python.h is not there: install them "
        f"(Debian/Ubuntu: apt install python{version}-dev)."
    )


def test_no_ensurepip(monkeypatch):
    monkeypatch.setitem(sys.modules, "ensurepip", None)
    version = "{}.{}".format(*sys.version_info)
    assert set_up.venv_problem() == (
        "Python's modules venv and ensurepip are needed (import of ensurepip halted; None in "
        f"sys.modules): install them (Debian/Ubuntu: apt install python{version}-venv)."
    )


def test_this_machine_has_all_that_is_needed():
    assert set_up.compiler_problem() is None
    assert set_up.headers_problem() is None
    assert set_up.venv_problem() is None


# Failing and being interrupted.


def test_no_network(checkout):
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    process = start(checkout, **offline)
    pip = set_up.titled(*set_up.select(PINS, ["pip"]))
    assert process.communicate() == (
        f"[1/5] .venv with {pip}: about 10 seconds\n",
        f"pip could not get the packages of '.venv with {pip}': check the network connection and "
        "pip's index settings, then run the same command again (pip's log: .venv/set_up.log).\n",
    )
    assert process.returncode == 1
    assert "No matching distribution" in (checkout / ".venv" / "set_up.log").read_text()


def test_ctrl_c(checkout):
    process = start(checkout)
    assert process.stdout.readline().startswith("[1/5]")
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "\ninterrupted; the same command goes on from here\n")
    assert process.returncode == 130


def test_an_interrupted_command_ends_with_all_that_it_started():
    command = ["sh", "-c", "sleep 60 & echo started; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout.readline() == b"started\n"
        set_up.end(process)
        # The pipe's end is reached once no process holds it any more.
        assert process.stdout.read() == b""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0", True),
        ("packages in these conflicts have no matching distributions available", True),
        ("ERROR: HTTPSConnectionPool: Max retries exceeded with url: /simple/torch/", True),
        ("ReadTimeoutError: HTTPSConnectionPool: Read timed out.", True),
        ("WARNING: Retrying after connection broken by 'NewConnectionError'", False),
        ("g++: fatal error: Killed signal terminated program cc1plus", False),
    ],
)
def test_network_failures_are_told_from_others(line, expected):
    assert set_up.is_network_failure("Collecting torch\n" + line) is expected


def test_other_failures_show_the_end_of_the_log(checkout):
    output = "\n".join(f"line {number}" for number in range(20))
    with pytest.raises(set_up.SetUpError) as raised:
        set_up.set_up(checkout, FakeRun(fail_at=5, failure=(1, output)))
    title, *lines = str(raised.value).splitlines()
    fairseq = set_up.titled(*set_up.select(PINS, ["fairseq-fixed"]))
    assert title == f"'{fairseq}, compiled here' failed; the last lines of .venv/set_up.log:"
    assert lines == [f"line {number}" for number in range(5, 20)]


def test_a_second_set_up_waits_for_the_first(checkout, tmp_path):
    with open(checkout / "requirements" / "development.txt", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(checkout, PATH=str(tmp_path))
        assert process.stdout.readline() == WAITING
        assert process.poll() is None
    output, problem = process.communicate()
    assert output == ""
    assert problem.startswith("A C compiler is needed")


def test_run_returns_the_output_of_this_command_and_logs_all(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    with open(tmp_path / "lock", "w") as lock:
        result = set_up.run(log, lock, ["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert result == (3, "out\nerr\n")
    assert log.read_text() == "before\nout\nerr\n"


def test_foreign_packages_and_cuda_are_kept_out(monkeypatch):
    for name in ("PYTHONPATH", "PYTHONHOME", "CUDA_HOME"):
        monkeypatch.setenv(name, "/elsewhere")
    assert "/elsewhere" not in set_up.child_environment().values()


# When .venv is built.


def test_stages_are_announced(checkout, capsys):
    set_up.set_up(checkout, FakeRun())
    lines = capsys.readouterr().out.splitlines()
    assert [line[:5] for line in lines[:5]] == ["[1/5]", "[2/5]", "[3/5]", "[4/5]", "[5/5]"]
    assert re.fullmatch(r"Set up \.venv in \d+ min \d+ s\.", lines[5])
    fairseq = set_up.titled(*set_up.select(PINS, ["fairseq-fixed"]))
    assert lines[3] == f"[4/5] {fairseq}, compiled here: about 2 minutes"


def test_every_pin_is_installed(checkout):
    run = FakeRun()
    set_up.set_up(checkout, run)
    assert set(PINS) <= {argument for command in run.commands for argument in command}


def test_repeated_set_up_does_nothing(built, capsys):
    capsys.readouterr()
    run = FakeRun()
    set_up.set_up(built, run)
    assert run.commands == []
    assert capsys.readouterr().out == ""


def test_interrupted_set_up_goes_on(checkout):
    with pytest.raises(KeyboardInterrupt):
        set_up.set_up(checkout, FakeRun(fail_at=5, failure=KeyboardInterrupt()))
    packages = checkout / ".venv" / "lib" / "python3" / "site-packages"
    for name, files in (("whole", ["METADATA", "INSTALLER"]), ("half", ["METADATA"])):
        info = packages / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        for file in files:
            (info / file).touch()

    run = FakeRun()
    set_up.set_up(checkout, run)
    assert not run.made_venv
    assert len(run.commands) == 4
    assert [info.name for info in packages.iterdir()] == ["whole-1.0.dist-info"]

    run = FakeRun()
    set_up.set_up(checkout, run)
    assert run.commands == []


def test_interrupted_while_the_bare_venv_is_made(checkout):
    with pytest.raises(KeyboardInterrupt):
        set_up.set_up(checkout, FakeRun(fail_at=2, failure=KeyboardInterrupt()))
    run = FakeRun()
    set_up.set_up(checkout, run)
    assert run.made_venv


def change_pins(checkout, monkeypatch):
    pins = checkout / "requirements" / "development.txt"
    pins.write_text(re.sub("ruff==.*", "ruff==0.0.1", pins.read_text()))
    return checkout


def change_python(checkout, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: "cpython-312-x86_64-linux-gnu")
    return checkout


def change_plan(checkout, monkeypatch):
    monkeypatch.setattr(set_up, "PLAN", set_up.PLAN + 1)
    return checkout


def move_checkout(checkout, monkeypatch):
    return checkout.rename(checkout.with_name("moved"))


def remove_stamp(checkout, monkeypatch):
    (checkout / ".venv" / "set_up.stamp").unlink()
    return checkout


def break_pip(checkout, monkeypatch):
    make_python(checkout / ".venv", script="exit 1")
    return checkout


def remove_python(checkout, monkeypatch):
    (checkout / ".venv" / "bin" / "python").unlink()
    return checkout


@pytest.mark.parametrize(
    "change",
    [
        change_pins,
        change_python,
        change_plan,
        move_checkout,
        remove_stamp,
        break_pip,
        remove_python,
    ],
)
def test_a_venv_that_does_not_fit_is_replaced(built, monkeypatch, change):
    checkout = change(built, monkeypatch)
    leftover = checkout / ".venv" / "leftover"
    leftover.touch()
    run = FakeRun()
    set_up.set_up(checkout, run)
    assert run.made_venv
    assert not leftover.exists()


def test_a_linked_venv_is_replaced_but_not_emptied(checkout, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    (checkout / ".venv").symlink_to(elsewhere)
    set_up.set_up(checkout, FakeRun())
    assert not (checkout / ".venv").is_symlink()
    assert (elsewhere / "file").exists()
