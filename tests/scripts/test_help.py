"""Every command explains itself at once: torch, fairseq and numpy take seconds to import."""

import subprocess
import sys

from scripts._shared.commands import ROOT

COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "scripts").glob("[a-z]*/[a-z]*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
SLOW = ("numpy", "torch", "fairseq", "sacremoses", "matplotlib")


def test_help_imports_nothing_slow():
    helped = f"""
import importlib, sys
for name in {COMMANDS}:
    try:
        importlib.import_module(name).main(["--help"])
    except SystemExit as ended:
        assert ended.code == 0
    slow = [module for module in {SLOW} if module in sys.modules]
    assert not slow, f"{{name}} imports {{slow}}"
"""
    assert len(COMMANDS) > 15
    ended = subprocess.run([sys.executable, "-c", helped], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
