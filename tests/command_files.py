"""What the command files of examples give to fairseq, and what fairseq understands."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from fairseq import options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# in a table of flags: what a model or a source does not have
ABSENT = "\N{EN DASH}"
# fairseq's use of hydra
HYDRA = r"ignore:[\s\S]*is validated against ConfigStore:UserWarning"


def of_room(room):
    """Names of the command files of a folder of examples."""
    return sorted(path.stem for path in (EXAMPLES / room).glob("*.sh"))


def write_stand_ins(folder):
    """Fill a folder with commands that print their words as JSON, and CHECKPOINTS that has one."""
    for name in ("fairseq-train", "fairseq-eval-lm"):
        path = folder / name
        program = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
        path.write_text(program, encoding="utf-8")
        path.chmod(0o755)
    (folder / "CHECKPOINTS").mkdir()
    (folder / "CHECKPOINTS" / "checkpoint_last.pt").touch()
    return folder


def commands(stand_ins, recipe, action, *more, data="DATA", checkpoints=None):
    """The words that an action of a command file gives to each of its commands."""
    places = (data, checkpoints or stand_ins / "CHECKPOINTS")
    done = subprocess.run(
        ["bash", EXAMPLES / f"{recipe}.sh", action, *places, *more],
        env={**os.environ, "PATH": f"{stand_ins}:{os.environ['PATH']}"},
        # they work from any folder
        cwd=stand_ins,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def words(*given, **places):
    """The words of an action's only command, for the arguments of ``commands``."""
    (only,) = commands(*given, **places)
    return only


def parse(parser, given):
    """fairseq's reading of a command's words."""
    return convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, given))


def training(stand_ins, recipe, *more, action="train"):
    return parse(options.get_training_parser(), words(stand_ins, recipe, action, *more))


def evaluation(stand_ins, recipe, *more):
    return parse(options.get_eval_lm_parser(), words(stand_ins, recipe, "evaluate", *more))


def tables(room, heading):
    """The tables in a section of a room's README: rows of cells, the heads of columns first."""
    readme = (EXAMPLES / room / "README.md").read_text(encoding="utf-8")
    section = readme.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    rows = [[line.strip("| ").split(" | ") for line in table.splitlines()] for table in found]
    return [[head, *body] for head, _, *body in rows]


def flags(table, name):
    """What a table of flags beside a source's says of a command file: the cell of each option."""
    head, *rows = table
    column = head.index(f"`{name}`")
    return {flag: row[column] for row in rows for flag in re.findall(r"`([\w-]+)`", row[1])}


def value(cfg, flag):
    """The value of an option, such as ``--lr``, in what fairseq makes of a command."""
    option = flag.lstrip("-").replace("-", "_")
    if option in ("optimizer", "lr_scheduler"):
        return cfg[option]._name
    groups = ("model", "task", "dataset", "optimization", "optimizer", "lr_scheduler")
    parts = [cfg[group] for group in (*groups, "checkpoint", "criterion")]
    found = next(part[option] for part in parts if part and option in part)
    return found[0] if option == "lr" else found


def same(found, cell):
    """Whether a value is what a cell says: yes, no, a number or a word."""
    if cell in ("yes", "no"):
        return found is (cell == "yes")
    if isinstance(found, int | float):
        return found == float(cell)
    return found == cell


def dictionary(symbols):
    """A dictionary of as many made-up symbols."""
    made = Dictionary()
    for number in range(symbols - len(made)):
        made.add_symbol(f"symbol{number}")
    return made


def parameters(model):
    """How many numbers a model has."""
    return sum(parameter.numel() for parameter in model.parameters())
