"""Without fairseq, Hydra and numba, layers compute the same and other imports say what to do."""

import json
import subprocess
import sys

import pytest
import torch

from tests.end_to_end.commands import ROOT, environment
from tests.modules import page

# starts three Python processes
pytestmark = pytest.mark.slow

# imports fail as if these packages were not installed
BLOCK = """
import sys
for name in ("fairseq", "fairseq_cli", "omegaconf", "hydra", "numba"):
    sys.modules[name] = None
"""
MISSING = """
import json
import fairseq_plugins.modules
errors = {}
for name in ("load", "weighted_transformer.model"):
    package, _, wanted = f"fairseq_plugins.{name}".rpartition(".")
    try:
        exec(f"from {package} import {wanted}")
    except ImportError as error:
        errors[name] = [type(error).__name__, str(error)]
print(json.dumps(errors))
"""
RUN = "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run_without_fairseq(script, *words):
    """Run a script in a Python without fairseq; return its output and errors."""
    command = [sys.executable, "-c", BLOCK + script, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_what_needs_fairseq_says_how_to_get_it():
    errors = json.loads(run_without_fairseq(MISSING)[0])
    assert {kind for kind, _ in errors.values()} == {"ModuleNotFoundError"}
    needed = "needs fairseq 0.12, which is not installed: pip install "
    assert needed in errors["load"][1]


def test_layers_compute_what_they_do_with_fairseq_and_numba(tmp_path):
    _, errors = run_without_fairseq(RUN, page.__file__, tmp_path / "layers.pt")
    torch.testing.assert_close(torch.load(tmp_path / "layers.pt"), page.results())
    assert errors.startswith("memories on this CPU go without compiled loops")
    assert "pip install '.[fast]'" in errors


def test_the_example_trains():
    example = ROOT / "examples" / "plain_pytorch" / "train.py"
    lines = run_without_fairseq(RUN, example, page.PAGE, "--updates", 100)[0].splitlines()
    assert [line.rpartition(": ")[0] for line in lines] == ["updates 1 to 50", "updates 51 to 100"]
    first, second = (float(line.rpartition(": ")[2].split()[0]) for line in lines)
    assert second < 0.85 * first
