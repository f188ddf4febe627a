"""The recipes of examples/: their names, and the commands that PRINT=1 prints."""

import os
import re
import shlex
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAPERS = ("transformer_xl", "all_attention", "product_key_memory", "weighted_transformer")
# a warning about fairseq's use of Hydra
HYDRA = r"ignore:[\s\S]*is validated against ConfigStore:UserWarning"


def call(paper, *words, folder=ROOT, **environment):
    return subprocess.run(
        ["bash", EXAMPLES / paper / "recipes.sh", *words],
        env={**os.environ, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
    )


def commands(paper, name, action, *more, data="DATA", checkpoints="CHECKPOINTS"):
    """Return the words of each command of an action, except the initial mkdir."""
    done = call(paper, name, action, data, checkpoints, *more, PRINT="1")
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in printed if not line.startswith("mkdir ")]


def words(*given, **places):
    """Return the arguments of an action's only fairseq command."""
    return commands(*given, **places)[0][1:]


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def tables(paper, heading):
    """Return the tables in a section of a paper's details.md as rows of cells, header first."""
    page = (EXAMPLES / paper / "details.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [[cells(line) for line in table.splitlines() if "|---" not in line] for table in found]


def listed(paper):
    """Return the symbols and parameters of each recipe, as written in the list of a paper.

    A column whose head begins with _ is a recipe of its own; the head is the end of its name.
    """
    found, columns = {}, {}
    for line in call(paper).stdout.splitlines():
        if line.startswith("name "):
            # cells may be empty, so columns are split where their heads begin
            heads = list(re.finditer(r"\S+(?: \S+)*", line))
            ends = [head.start() for head in heads[1:]] + [None]
            columns = {
                head.group(): slice(head.start(), end)
                for head, end in zip(heads, ends, strict=True)
            }
        elif not line:
            columns = {}
        for head, place in columns.items() if not line.startswith("name ") else ():
            parameters = line[place].strip()
            if parameters and (head == "parameters" or head.startswith("_")):
                name = line[columns["name"]].strip() + head.removeprefix("parameters")
                found[name] = (line[columns["symbols"]].strip(), parameters)
    return found
