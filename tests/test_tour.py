"""examples/tour.ipynb runs from top to bottom, and its saved outputs match its code."""

import io
import json
import multiprocessing
import os
import re
from contextlib import redirect_stdout

import pytest

from tests.recipes import EXAMPLES

TOUR = EXAMPLES / "tour.ipynb"
TEXT = TOUR.read_text(encoding="utf-8")
CELLS = [cell for cell in json.loads(TEXT)["cells"] if cell["cell_type"] == "code"]

# Slow code and its replacements, which do not change which cells print and draw.
SHORTER = {r"--max-update \d+": "--max-update 20", r"source\(textwrap\)": "source(textwrap)[:2000]"}
# seconds, after which the notebook counts as hanging
LIMIT = 420


def run_notebook(folder):
    """Execute the code cells in one namespace; save each one's output and number of figures."""
    os.environ["MPLBACKEND"] = "agg"
    import matplotlib.pyplot as plt

    made, names = [], {"__name__": "__main__"}
    for cell in CELLS:
        printed, source = io.StringIO(), "".join(cell["source"])
        for long, short in SHORTER.items():
            source = re.sub(long, short, source)
        with redirect_stdout(printed):
            exec(source, names)
        made.append([printed.getvalue(), len(plt.get_fignums())])
        plt.close("all")
    (folder / "made.json").write_text(json.dumps(made), encoding="utf-8")


@pytest.mark.slow
def test_every_cell_prints_and_draws_what_is_saved(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=run_notebook, args=(tmp_path,))
    process.start()
    process.join(LIMIT)
    process.kill()
    assert process.exitcode == 0
    made = json.loads((tmp_path / "made.json").read_text(encoding="utf-8"))
    for cell, (text, pictures) in zip(CELLS, made, strict=True):
        # the numbers in the text depend on the machine
        printed = {output["name"] for output in cell["outputs"] if "name" in output}
        assert printed == ({"stdout"} if text else set()), cell["source"]
        drawn = sum("image/png" in output.get("data", {}) for output in cell["outputs"])
        assert drawn == pictures, cell["source"]
    # a text scored in pieces gets the same score as in one piece
    (both,) = (text for text, _ in made if "line by line" in text)
    pieces, whole = (line.split(":")[1].strip() for line in both.splitlines())
    assert pieces == whole
