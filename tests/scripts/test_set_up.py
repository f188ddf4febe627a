"""A repeated set-up does nothing."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, PINS = Path("scripts/set_up.sh"), Path("requirements/development.txt")


def test_a_repeated_set_up_does_nothing(tmp_path):
    root = (tmp_path / "check out").resolve()
    for path in (SCRIPT, PINS):
        (root / path).parent.mkdir(parents=True)
        shutil.copy(ROOT / path, root / path)
    texts = [(root / path).read_text().rstrip("\n") for path in (PINS, SCRIPT)]
    identity = "\n".join([str(root), sysconfig.get_config_var("SOABI"), *texts])
    (root / ".venv/bin").mkdir(parents=True)
    (root / ".venv/bin/python").symlink_to(sys.executable)
    (root / ".venv/set_up.stamp").write_text(identity)
    words = ["bash", SCRIPT, sys.executable]
    ended = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
