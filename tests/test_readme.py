"""What the README says is there is there, and its commands run."""

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClipConfig
from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.all_attention.span_loss import SpanCrossEntropyConfig
from fairseq_plugins.product_key_memory.model import MemoryTransformerOptions
from fairseq_plugins.product_key_memory.options import MemoryLayersOptions
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingConfig
from fairseq_plugins.transformer_xl.model import TransformerXLConfig
from fairseq_plugins.weighted_transformer.model import BranchOptions
from tests.end_to_end.commands import PLUGIN, ROOT, environment, run

# of papers, and what two of them share
ROOMS = (
    "transformer_xl",
    "all_attention",
    "segment_language_model",
    "product_key_memory",
    "weighted_transformer",
)
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in README.splitlines()
    if line.startswith("| ") and "](" in line
]


def links(text):
    """Return the targets of the Markdown links in a text."""
    return re.findall(r"\]\(([^)#]+)\)", text)


def dead_rows(rows, root):
    """Return the rows that name no file, test or example, or one that does not exist."""
    return [
        row
        for row in rows
        if len(row) != 4
        or any(len(links(cell)) != 1 or not (root / links(cell)[0]).is_file() for cell in row[1:])
    ]


def test_the_table_has_no_dead_row():
    assert len(TABLE) >= 10
    assert dead_rows(TABLE, ROOT) == []


def test_a_dead_row_would_be_found(tmp_path):
    assert dead_rows(TABLE, tmp_path) == TABLE
    assert dead_rows([TABLE[0][:3]], ROOT) == [TABLE[0][:3]]


def test_links_of_the_table_are_named_after_their_files():
    for row in TABLE:
        for name, target in re.findall(r"\[`([^`]*)`\]\(([^)]*)\)", " ".join(row[1:])):
            assert target.endswith(f"/{name}") or target == name, target


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_of_a_room_is_in_the_table(room):
    listed = {target for row in TABLE for target in links(row[1])}
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (PLUGIN / room).glob("*.py")
        if path.name not in ("__init__.py", "presets.py")
    }
    missing = sorted(files - listed)
    assert not missing, f"README.md, From the paper to the code, has no row for {missing}"


def option_row(option):
    """Return the README's row of an option of a configuration."""
    default = option.default
    default = "" if default is None or default is False else f"{default}"
    help_text = option.metadata["help"].replace("|", "\\|")
    return f"| `--{option.name.replace('_', '-')}` | {default} | {help_text} |"


@pytest.mark.parametrize(
    "config",
    [
        SegmentLanguageModelingConfig,
        AllAttentionConfig,
        TransformerXLConfig,
        SpanCrossEntropyConfig,
        AdagradWithClipConfig,
        MemoryLayersOptions,
        MemoryTransformerOptions,
        BranchOptions,
    ],
)
def test_every_option_is_listed_as_it_is(config):
    for option in dataclasses.fields(config):
        if option.name not in ("_name", "data") and option.metadata.get("help"):
            assert option_row(option) in README.splitlines()


def test_links_lead_to_files():
    for target in links(README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the README's commands find the plugin and a small corpus."""
    place = tmp_path_factory.mktemp("readme")
    for name in ("fairseq_plugins", "scripts"):
        (place / name).symlink_to(ROOT / name)
    text = place / "quickstart" / "data" / "text"
    text.mkdir(parents=True)
    lines = [
        f"d e f ▁ f {number} ( x ) : + =".replace(str(number), " ".join(str(number)))
        for number in range(400)
    ]
    for split, number in (("train", 400), ("valid", 50), ("test", 50)):
        (text / split).write_text("\n".join(lines[:number]) + "\n", encoding="utf-8")
    splits = [f"--{split}pref={text / split}" for split in ("train", "valid", "test")]
    run("fairseq-preprocess", "--only-source", *splits, "--destdir", text.parent / "bin")
    return place


def shell(command, place):
    """Return what a shell prints for a command in a folder."""
    search = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=place,
        env=environment(PATH=search, PYTHONIOENCODING="utf-8"),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def test_the_commands_run_in_order(folder):
    commands = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    assert [re.search(r"fairseq-[\w-]+|memory_usage", c)[0] for c in commands] == [
        "fairseq-train",
        "fairseq-eval-lm",
        "fairseq-interactive",
        "fairseq-interactive",
        "fairseq-generate",
        "fairseq-train",
        "fairseq-eval-lm",
        "memory_usage",
    ]
    printed = []
    for command in commands:
        command = re.sub(r"--max-update \d+", "--max-update 3", command)
        pipe, _, words = command.rpartition(" | ")
        # shlex takes an escaped end of a line for a word
        name, *words = shlex.split(words.replace("\\\n", " "))
        if name == "python":
            printed.append(shell(command, folder))
        else:
            text = shell(pipe, folder)
            printed.append(run(name, *words, text=text, folder=folder))
    assert (folder / "checkpoints" / "checkpoint_last.pt").exists()
    assert "recurrence 64 tokens" in printed[1]
    assert "each token is a character: Loss (base 2) is in bits per character" in printed[1]
    assert re.search(r"^H-0\t\S+\td e f ▁", printed[2], re.MULTILINE)
    assert re.findall(r"^H-\d+\t\S+\t(.*)$", printed[3], re.MULTILINE) == [
        "d e f ▁ f ( x ) :",
        "x + = 1",
    ]
    assert len(re.findall(r"^H-\d+\t", printed[4], re.MULTILINE)) >= 8
