"""The declarations in corpora.yaml and options.yaml, and the parser that they make."""

import argparse
import hashlib
import os
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from scripts._shared.command_line import check_at_least

Corpus = dict[str, Any]
SPLITS = ("train", "valid", "test")
SUFFIXES = (".txt", ".txt.gz")
# Largest default of --workers: each process of fairseq holds the dictionary.
MOST_WORKERS = 16
# Fields of options.yaml that are not argparse's.
OWN_FIELDS = ("default", "minimum", "units", "recorded")


def readable_path(path: str) -> Path:
    """Return the absolute path of a readable file or folder; argparse names the option."""
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be read: give a file or folder that can")
    return Path(path).resolve()


def absolute_path(path: str) -> Path:
    """Return the absolute path that an option names."""
    return Path(path).resolve()


TYPES = {"int": int, "float": float, "file": readable_path, "path": absolute_path}


@cache
def read_yaml(name: str) -> dict[str, Any]:
    """Return the content of a YAML file of this folder."""
    return yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def find_corpus(name: str) -> Corpus:
    """Return the declaration of a corpus."""
    corpora = read_yaml("corpora.yaml")
    if name not in corpora:
        near = get_close_matches(name, corpora, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(
            f"there is no corpus {name}{meant}: `python -m scripts.prepare --list` lists the names"
        )
    return corpora[name]


def options_of(corpus: Corpus) -> dict[str, dict[str, Any]]:
    """Return the fields of each option that a corpus takes, by name."""
    known, groups = (read_yaml("options.yaml")[key] for key in ("options", "groups"))
    taken: dict[str, dict[str, Any]] = {}
    changes = corpus["takes"]
    for item in changes:
        for name in groups.get(item, [item]):
            changed = changes.get(name) if isinstance(changes, dict) else None
            taken[name] = {**known.get(name, {}), **(changed or {})}
    return taken


def add_options(parser: argparse.ArgumentParser, corpus: Corpus) -> None:
    """Add --output and the options of a corpus, all without a default."""
    text = "folder of the result; fairseq reads DIR/bin"
    parser.add_argument("--output", type=absolute_path, required=True, metavar="DIR", help=text)
    for name, fields in options_of(corpus).items():
        fields = {key: value for key, value in fields.items() if key not in OWN_FIELDS}
        if "type" in fields:
            fields["type"] = TYPES[fields["type"]]
        if fields.get("action") == "yes or no":
            fields["action"] = argparse.BooleanOptionalAction
        parser.add_argument(f"--{name}", **fields, default=None)


def settle(options: argparse.Namespace, corpus: Corpus) -> None:
    """Give options their defaults; raise ValueError for one that is too small or of no use."""
    values, defaults = vars(options), corpus.get("defaults", {})
    taken = options_of(corpus)
    unit = values.get("unit") or defaults.get("unit")
    for name in (*read_yaml("options.yaml")["options"], *taken):
        fields = taken.get(name, {})
        key = fields.get("dest", name.replace("-", "_"))
        units = fields.get("units", [unit])
        value = values.get(key)
        if value is None:
            value = defaults.get(name, fields.get("default")) if unit in units else None
        elif unit not in units:
            raise ValueError(f"--{name} is for --unit {' or '.join(units)}: leave it out")
        values[key] = value
        if "minimum" in fields:
            check_at_least(fields["minimum"], **{key: value})
    if options.workers is None:
        options.workers = min(os.cpu_count() or 1, MOST_WORKERS)


def digest(path: Path, algorithm: str = "sha256") -> str:
    """Return a checksum of a file."""
    total = hashlib.new(algorithm)
    with path.open("rb") as file:
        while piece := file.read(2**20):
            total.update(piece)
    return total.hexdigest()


def texts_of(folder: Path) -> dict[str, Path]:
    """Return the texts of a folder by name: the three parts, if there is one, or all documents."""
    documents = {}
    # of a.txt and a.txt.gz, a.txt is read
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.name.endswith(SUFFIXES) and path.is_file():
            name = path.relative_to(folder).as_posix().removesuffix(".gz").removesuffix(".txt")
            documents[name] = path
    parts = {split: documents[split] for split in SPLITS if split in documents}
    return parts or {name: documents[name] for name in sorted(documents)}


def side_of(prefix: Path, language: str) -> Path | None:
    """Return the file PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz, if there is one."""
    names = f"{prefix.name}.{language}", f"{prefix.name}.{language}.gz"
    return next((path for path in map(prefix.with_name, names) if path.is_file()), None)


def contents(path: Path, languages: Iterable[str]) -> str:
    """Return a checksum of a file, or of the texts of a folder or prefix, with their names."""
    if path.is_file():
        return digest(path)
    if path.is_dir():
        texts = [*texts_of(path).values()]
    else:
        texts = [side for side in (side_of(path, code) for code in languages) if side]
    lines = (f"{text.relative_to(path.parent)} {digest(text)}\n" for text in sorted(texts))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def recorded_options(options: argparse.Namespace, corpus: Corpus) -> dict[str, Any]:
    """Return the options that change what is written; files are represented by their contents."""
    recorded: dict[str, Any] = {}
    languages = (options.source_lang, options.target_lang)
    for name, fields in options_of(corpus).items():
        value = getattr(options, fields.get("dest", name.replace("-", "_")))
        if fields.get("recorded", True) and value is not None:
            paths = value if isinstance(value, list) else [value]
            values = [
                contents(path, languages) if isinstance(path, Path) else path for path in paths
            ]
            recorded[name] = values if isinstance(value, list) else values[0]
    return recorded
