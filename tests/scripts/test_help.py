"""Every command prints its help at once: slow modules are imported only afterwards."""

import subprocess
import sys

from scripts._shared.commands import ROOT

COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "scripts").glob("[a-z]*/[a-z]*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
COMMANDS += ["scripts.inspect", "scripts.prepare"]
SLOW = ("numpy", "torch", "fairseq", "sacremoses", "matplotlib")
HELPED = f"""
import runpy, sys
for name in {COMMANDS}:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, name
    slow = [module for module in {SLOW} if module in sys.modules]
    assert not slow, f"{{name}} imports {{slow}}"
"""


def test_help_imports_nothing_slow():
    assert len(COMMANDS) > 10
    words = [sys.executable, "-c", HELPED]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert all(f"python -m {name}" in ended.stdout for name in COMMANDS)
