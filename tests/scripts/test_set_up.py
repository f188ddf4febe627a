"""Set-up: what it refuses, how it fails, when it rebuilds .venv, and the settings of uv."""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/set_up.sh"
PINS = "requirements/development.txt"
STAMP = ".venv/set_up.stamp"
# Stands in for Python and uv: logs installations, copies itself into .venv, fails on request.
FAKE = f"""#!/usr/bin/env bash
case "$*" in
    *"import os"*) "{sys.executable}" "$@" | sed -e "2s#.*#$0#" -e "${{FACTS-}}" ;;
    *"import ensurepip"*) [ -z "${{NO_VENV-}}" ] ;;
    *"config list"*) "{sys.executable}" "$@" ;;
    *install* | "-m venv .venv")
        printf '%s\\n' "$*" "${{PYTHONPATH-}}${{PYTHONHOME-}}${{CUDA_HOME-}}" >> calls
        env | grep -E '^(UV_|SSL_CERT_FILE|ALL_PROXY)' > variables
        if [[ "$*" == *${{FAIL-nothing}}* ]]; then
            printf "${{OUTPUT-}}"
            [ -z "${{OUTPUT-}}" ] || exit 1
            sleep 60 & touch begun; sleep 60
        fi
        [ "$1 $2" != "-m venv" ] ||
            {{ mkdir -p .venv/bin .venv/lib/python3/site-packages/torch && cp "$0" .venv/bin/python
               mkdir ".venv/lib/python3/site-packages/torch-${{TORCH-1}}.dist-info"
               echo "${{BUILD-cpu}}" > .venv/lib/python3/site-packages/torch/version.py; }}
        [ "$2" != pip ] || cp "$0" .venv/bin/uv ;;
esac
"""


def start(checkout, python="./python", **environment):
    """Start a set-up in a checkout, without this machine's settings of pip and uv."""
    own = re.compile("PIP_|UV_|SSL_CERT_FILE|.*PROXY", re.IGNORECASE)
    others = {name: value for name, value in os.environ.items() if not own.match(name)}
    return subprocess.Popen(
        [shutil.which("bash"), SCRIPT, python],
        cwd=checkout,
        env={**others, "PIP_CONFIG_FILE": os.devnull, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def set_up(checkout, *arguments, **environment):
    """Run a set-up; return its exit status, output and errors."""
    process = start(checkout, *arguments, **environment)
    output, errors = process.communicate()
    return process.returncode, output, errors


def calls(checkout):
    """Return the commands that ran since the last call."""
    file = checkout / "calls"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


@pytest.fixture
def checkout(tmp_path):
    """Return a checkout with copies of the files that set-up reads, and a stand-in for Python."""
    root = (tmp_path / "check out").resolve()
    for name in (SCRIPT, PINS):
        (root / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / name)
    (root / "python").write_text(FAKE)
    (root / "python").chmod(0o755)
    return root


@pytest.mark.parametrize(
    ("python", "facts", "environment", "named"),
    [
        ("./python", "1s/.*/3.9 None/", {}, "Python 3.10 to 3.13 is needed and 3.9 is not"),
        ("./python", "1s/.*/3.14 None/", {}, "Python 3.10 to 3.13 is needed and 3.14 is not"),
        ("no-python", "", {}, "Python 3.10 to 3.13 is needed and 'no-python'"),
        ("./python", "1s/[^ ]*/3.12/; 3s#.*#/nowhere#", {}, "apt install python3.12-dev"),
        ("./python", "1s/[^ ]*/3.12/", {"NO_VENV": "yes"}, "apt install python3.12-venv"),
        (sys.executable, "", {}, "(cc or gcc, c++ or g++): install them"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(checkout, python, facts, environment, named):
    if python == sys.executable:
        programs = checkout / "bin"
        programs.mkdir()
        for name in ("flock", "cat"):
            (programs / name).symlink_to(shutil.which(name))
        (programs / "gcc").touch(mode=0o755)
        environment = {"PATH": str(programs)}
    status, output, errors = set_up(checkout, python, FACTS=facts, **environment)
    assert (status, output, errors.count("\n")) == (1, "", 1)
    assert named in errors
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize(
    ("failing", "title", "output"),
    [
        ("pip install", "[2/4] uv", "HTTPSConnectionPool: Max retries exceeded with url: /uv/"),
        ("torch", "[3/4] torch", "No solution found when resolving dependencies:"),
        ("no-deps", "[4/4] fairseq and the other packages", "Failed to download `lxml==6.1.3`"),
    ],
)
def test_no_network(checkout, failing, title, output):
    status, _, errors = set_up(checkout, FAIL=failing, OUTPUT=output)
    assert (status, errors.count("\n")) == (1, 1)
    assert errors.startswith(f"The packages of '{title}' could not be downloaded: check the netw")
    assert output in (checkout / ".venv" / "set_up.log").read_text()


def test_other_failures_show_the_end_of_the_log(checkout):
    output = "".join(f"line {number}\n" for number in range(20))
    status, _, errors = set_up(checkout, FAIL="no-deps", OUTPUT=output)
    assert (status, errors.splitlines()[1:]) == (1, output.splitlines()[5:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_number", "version"), [(signal.SIGINT, "3.10"), (signal.SIGTERM, "3.13")]
)
def test_an_interrupted_set_up_ends_all_that_it_started_and_goes_on(
    checkout, signal_number, version
):
    process = start(checkout, FAIL="torch Cython")
    while not (checkout / "begun").exists():
        assert process.poll() is None
    process.send_signal(signal_number)
    output, errors = process.communicate()
    assert output.splitlines()[-1].startswith("[3/4] torch: about ")
    assert errors == "\ninterrupted; the same command goes on from here\n"
    assert process.returncode == 130
    # every command inherits the lock, which is free once all of them have ended
    subprocess.run(["flock", "--timeout", "10", checkout / PINS, "true"], check=True)
    calls(checkout)
    assert set_up(checkout, FACTS=f"1s/[^ ]*/{version}/") == (0, ANY, "")
    assert len(calls(checkout)) == 8
    # the plugin can be imported from any folder
    path = checkout / ".venv/lib/python3/site-packages/fairseq_plugins.pth"
    assert path.read_text() == f"{checkout}\n"


def test_a_second_set_up_waits_for_the_first(checkout):
    with open(checkout / PINS, "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = start(checkout, NO_VENV="yes")
        waiting = "Another set-up of this .venv is running; waiting for it to end.\n"
        assert process.stdout.readline() == waiting
        assert process.poll() is None
    output, errors = process.communicate()
    assert output == ""
    assert errors.startswith("Python's modules venv and ensurepip are needed")


CONFIGURATION = """
[global]
index-url = https://index.example/simple
find-links =
    /first
    https://second.example/links
timeout = 20
[install]
extra-index-url = https://one.example/simple https://two.example/simple
trusted-host = one.example
[download]
find-links = /of-another-command
"""


def test_uv_is_handed_the_settings_of_pip(checkout):
    (checkout / "pip.conf").write_text(CONFIGURATION)
    environment = {"PIP_CONFIG_FILE": "pip.conf", "PIP_DEFAULT_TIMEOUT": "180"}
    environment |= {"PIP_CERT": "/certificates.pem", "REQUESTS_CA_BUNDLE": "/not-these.pem"}
    environment |= {"PIP_PROXY": "http://proxy.example", "UV_INSECURE_HOST": "of-uv.example"}
    environment |= {"PIP_INDEX_URL": "https://mine.example/simple"}
    # packages and a compiler from elsewhere are kept out
    foreign = dict.fromkeys(("PYTHONPATH", "PYTHONHOME", "CUDA_HOME"), "/elsewhere")
    assert set_up(checkout, **environment, **foreign)[0] == 0
    lines = (checkout / "variables").read_text().splitlines()
    assert dict(line.split("=", 1) for line in lines) == {
        "UV_INDEX_URL": "https://mine.example/simple",
        "UV_EXTRA_INDEX_URL": "https://one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/first,https://second.example/links",
        "UV_INSECURE_HOST": "of-uv.example",
        "UV_HTTP_TIMEOUT": "180",
        "UV_SYSTEM_CERTS": "1",
        "UV_LOCK_TIMEOUT": "3600",
        "SSL_CERT_FILE": "/certificates.pem",
        "ALL_PROXY": "http://proxy.example",
    }
    ran = calls(checkout)
    assert ran[1::2] == [""] * 4
    assert not any("--no-index" in call for call in ran)
    # uv uses the certificates of requests if pip has none, and no index if pip uses none
    (checkout / STAMP).unlink()
    assert set_up(checkout, REQUESTS_CA_BUNDLE="/of-requests.pem", PIP_NO_INDEX="1")[0] == 0
    assert "SSL_CERT_FILE=/of-requests.pem" in (checkout / "variables").read_text().splitlines()
    assert ["--no-index" in call for call in calls(checkout)[::2]] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "folder", "facts"),
    [
        (f"sed -i 's/ruff==.*/ruff==0.0.1/' {PINS}", "check out", ""),
        (f"echo '# another plan' >> {SCRIPT}", "check out", ""),
        ("printf '#!/bin/sh\\nexit 1\\n' > .venv/bin/python", "check out", ""),
        (f"rm {STAMP}", "check out", ""),
        (":", "moved", ""),
        (":", "check out", "1s/ .*/ cpython-312-another-machine/"),
    ],
)
def test_a_venv_that_does_not_fit_is_replaced_and_one_that_does_is_kept(
    checkout, change, folder, facts
):
    assert set_up(checkout)[0] == 0
    assert len(calls(checkout)) == 8
    assert set_up(checkout) == (0, "", "")
    assert calls(checkout) == []
    subprocess.run(["bash", "-c", change], cwd=checkout, check=True)
    checkout = checkout.rename(checkout.with_name(folder))
    leftover = checkout / ".venv" / "leftover"
    leftover.touch()
    assert set_up(checkout, FACTS=facts)[0] == 0
    assert not leftover.exists()
    assert len(calls(checkout)) == 8


def test_a_linked_venv_is_replaced_but_not_emptied(checkout, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "set_up.stamp").touch()
    (checkout / ".venv").symlink_to(elsewhere)
    assert set_up(checkout)[0] == 0
    assert not (checkout / ".venv").is_symlink()
    assert (elsewhere / "set_up.stamp").exists()


@pytest.mark.slow
def test_a_build_of_fairseq_is_kept_for_its_torch_alone(checkout):
    def cache_of_fairseq(**environment):
        (checkout / STAMP).unlink(missing_ok=True)
        assert set_up(checkout, **environment)[0] == 0
        return calls(checkout)[-2].partition("--cache-dir ")[2]

    found = [cache_of_fairseq(**of) for of in ({}, {"TORCH": "2"}, {"BUILD": "cu128"}, {})]
    assert all(found)
    assert found[0] == found[3]
    assert len(set(found)) == 3
