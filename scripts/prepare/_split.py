"""Step 3: split texts into train, valid and test, unless their files say it."""

import argparse
import hashlib
import random
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from scripts._shared.commands import short
from scripts.prepare._corpora import SPLITS, Corpus
from scripts.prepare._lines import read_lines
from scripts.prepare._read import Text

# The texts of each part and language, in the order of parts.
Parts = dict[str, dict[str, list[Text]]]
# Without --held-out, one in this many documents or lines is for validation, and one for testing.
SHARE = 20
# A source file is a near copy if more than LARGEST_COPIED of its lines of at least COMPARED_LENGTH
# characters are in earlier files.
COMPARED_LENGTH = 20
LARGEST_COPIED = 0.5
# Stands between documents.
EMPTY_LINE = Text("", lambda: [""])


def held_out(option: int | None, count: int, things: str) -> int:
    """Return the number of lines or files to hold out for each of valid and test."""
    number = max(1, count // SHARE) if option is None else option
    if 2 * number >= count:
        raise ValueError(
            f"--held-out {number} for each of valid and test leaves none of {count} {things} to "
            "train on: give a smaller number or more text"
        )
    return number


def split_lines(path: Path, options: argparse.Namespace) -> list[Text]:
    """Split a file: its last lines are for testing, those before them for validation."""
    count = sum(1 for _ in read_lines(path))
    number = held_out(options.held_out, count, "lines")
    cuts = (0, count - 2 * number, count - number, count)
    return [
        Text(short(path), partial(_some_lines, path, start, stop), split, start=start)
        for split, start, stop in zip(SPLITS, cuts, cuts[1:], strict=False)
    ]


def _some_lines(path: Path, start: int, stop: int) -> islice:
    return islice(read_lines(path), start, stop)


def draw_documents(texts: list[Text], options: argparse.Namespace) -> list[Text]:
    """Draw as many documents as --held-out says for each part; parts are in the order of names."""
    number = held_out(options.held_out, len(texts), "files *.txt and *.txt.gz")
    return _take_out(texts, random.Random(options.seed).sample(range(len(texts)), 2 * number))


def _take_out(texts: list[Text], numbers: list[int]) -> list[Text]:
    """Return the texts, half of these numbers for valid and half for test, the others for train."""
    half = len(numbers) // 2
    parts = dict.fromkeys(numbers[:half], "valid") | dict.fromkeys(numbers[half:], "test")
    return [replace(text, part=parts.get(i, "train")) for i, text in enumerate(texts)]


def draw_source_files(texts: list[Text], option: int) -> list[Text]:
    """Draw files of the training packages for valid and test; those of others become test1."""
    ours = [text for text in texts if text.part == "train"]
    others = [replace(text, part="test1") for text in texts if text.part != "train"]
    number = held_out(option, len(ours), "source files")
    # by a hash, which is the same in every version of Python
    order = [hashlib.sha256("\n".join(text.make()).encode()).digest() for text in ours]
    drawn = sorted(range(len(ours)), key=order.__getitem__)[: 2 * number]
    return _take_out(ours, drawn) + others


def drop_near_copies(texts: list[Text]) -> list[Text]:
    """Leave out texts of which most long lines are in earlier texts, or that have none."""
    # hashes, which need less memory
    seen: set[int] = set()
    different = []
    for text in texts:
        lines = [hash(line) for line in map(str.strip, text.make()) if len(line) >= COMPARED_LENGTH]
        if lines and sum(map(seen.__contains__, lines)) <= LARGEST_COPIED * len(lines):
            seen.update(lines)
            different.append(text)
    return different


def count_characters(text: Text) -> int:
    """Return the number of a text's characters, including line ends."""
    return sum(len(line) + 1 for line in text.make())


def draw_characters(texts: list[Text], number: int, seed: int = 1) -> list[Text]:
    """Draw documents for test, then for valid, until each has a number of characters."""
    # by a hash, which is the same in every version of Python
    texts = sorted(texts, key=lambda text: hashlib.sha256(f"{seed} {text.name}".encode()).digest())
    room, drawn = {"test": number, "valid": number}, []
    for text in texts:
        part = next((part for part in room if room[part] > 0), "train")
        if part in room:
            room[part] -= count_characters(text)
        drawn.append(replace(text, part=part))
    return drawn


def hold_out_every(texts: list[Text], rule: dict[str, Any]) -> list[Text]:
    """Hold out some of every N texts, unless they are large and would make up most of a part."""
    parts = {place: part for part in SPLITS[1:] for place in rule[part]}
    return [
        replace(
            text,
            part="train"
            if count_characters(text) > rule["largest"]
            else parts.get(number % rule["every"], "train"),
        )
        for number, text in enumerate(texts)
    ]


def cut_bytes(text: Text, sizes: list[int], folder: Path) -> list[Text]:
    """Cut a file by position into files of a folder, of these numbers of bytes."""
    parts = []
    with text.path.open("rb") as file:
        for split, number in zip(SPLITS, sizes, strict=True):
            path = folder / split
            path.write_bytes(file.read(number))
            parts.append(replace(text, part=split, path=path))
    return parts


def split(corpus: Corpus, texts: list[Text], options: argparse.Namespace, folder: Path) -> Parts:
    """Return the texts of each part and language."""
    rule, documents = corpus.get("split", {}), False
    if options.packages and options.held_out:
        texts = draw_source_files(texts, options.held_out)
    elif texts and all(text.part for text in texts):
        pass
    elif "bytes" in rule:
        texts = cut_bytes(texts[0], rule["bytes"], folder)
    elif "characters" in rule:
        texts, documents = draw_characters(texts, rule["characters"]), True
    elif "every" in rule:
        texts = hold_out_every(texts, rule)
    elif options.input.is_file():
        texts = split_lines(options.input, options)
    else:
        texts, documents = draw_documents(texts, options), True
    texts = sorted(texts, key=lambda text: SPLITS.index(text.part.rstrip("0123456789")))
    if options.packages:
        texts = drop_near_copies(texts)
    parts: Parts = {}
    order = [options.source_lang, options.target_lang]
    for text in texts:
        before = parts.setdefault(text.part, {}).setdefault(text.language, [])
        before += [EMPTY_LINE, text] if documents and before else [text]
    return {
        part: dict(sorted(sides.items(), key=lambda side: [side[0] != code for code in order]))
        for part, sides in parts.items()
    }
