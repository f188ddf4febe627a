"""Commands and second workers do not care who of them came first."""

import subprocess
import sys

from tests.end_to_end.commands import PLUGIN, ROOT, environment

ORDER = ("workers", "command", "workers")
SCRIPT = """
import sys
from pathlib import Path
from tests.end_to_end.commands import USER_DIR, run
from tests.two_workers import on_two_workers

def plugin_path(rank):
    import fairseq_plugins
    return fairseq_plugins.__path__[0]

if __name__ == "__main__":
    folder, *order = sys.argv[1:]
    for step in order:
        if step == "command":
            assert "--user-dir" in run("fairseq-preprocess", *USER_DIR, "--help")
        else:
            print(*on_two_workers(plugin_path, Path(folder)))
"""


def test_commands_and_workers_run_in_any_order(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", folder, *ORDER],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == [str(PLUGIN)] * 4
