"""Set-up, run in a folder that has what it reads."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/set_up.sh"
PINS = "requirements/development.txt"


def copy_set_up(root):
    """Copy what set-up reads into a new folder."""
    for name in (SCRIPT, PINS):
        (root / name).parent.mkdir(parents=True)
        shutil.copy(ROOT / name, root / name)


def start(checkout, python="./python", **environment):
    """Start set-up in a checkout, without this machine's settings of pip and uv."""
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
    """Return the exit status, the output and the errors of a set-up."""
    process = start(checkout, *arguments, **environment)
    output, errors = process.communicate()
    return process.returncode, output, errors
