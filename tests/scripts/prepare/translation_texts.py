"""Small parallel texts whose pairs can be told apart, and what prepares them."""

import contextlib
import gzip
import io
import re
import sys

import pytest

from scripts._shared import commands as run_command
from scripts.prepare import _binarize
from scripts.prepare import translation as prepare_translation
from tests.scripts.prepare.preprocess_in_process import in_this_process

LANGUAGES = ("en", "de")
# Pairs that are not to be trained on, by what is wrong with them.
EMPTY, LONG, UNEQUAL = (3, 4), (5, 16), (7, 18)
OPTIONS = "--bpe-size 120 --max-length 40 --workers 1".split()


def sentence(number, language):
    """Sentences of pair NUMBER have x...x in both languages, as one word."""
    named = f"x{number:03}x"
    plain = {
        "en": f"The {named} well-known cat sat, isn't it?",
        "de": f"Die {named} wohl-bekannte Katze saß, nicht wahr?",
    }
    if number in LONG:
        return " ".join([plain[language]] * 5)
    if number in UNEQUAL and (language == "en") == (number == UNEQUAL[0]):
        return f"{plain[language]} {plain[language]}"
    return {(EMPTY[0], "en"): "", (EMPTY[1], "de"): "\x07 "}.get(
        (number, language), plain[language]
    )


def write(prefix, numbers, packed=False):
    for language in LANGUAGES:
        content = "".join(f"{sentence(number, language)}\n" for number in numbers).encode()
        path = prefix.with_name(f"{prefix.name}.{language}{'.gz' * packed}")
        path.write_bytes(gzip.compress(content) if packed else content)


def run(place, *options, output="out"):
    """Status, stdout and stderr of the script for the texts of a folder."""
    words = ["prepare_translation.py", "--source-lang", "en", "--target-lang", "de"]
    words += ["--train", place / "one", place / "two", "--valid", place / "dev"]
    words += ["--test", place / "new", place / "dev", "--output", place / output, *OPTIONS]
    streams = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        patch.setattr(sys, "argv", [str(word) for word in (*words, *options)])
        if _binarize.child_process is run_command.child_process:
            patch.setattr(_binarize, "child_process", in_this_process)
        status = prepare_translation.main()
    return status, *(stream.getvalue() for stream in streams)


def write_all(folder):
    write(folder / "one", range(10))
    write(folder / "two", range(10, 25), packed=True)
    # some of the same kinds of pairs
    write(folder / "dev", (3, 5, 7, 30, 31))
    write(folder / "new", (4, 16, 18, 40, 41, 42), packed=True)


def refused(result, message):
    status, _, error = result
    return status == 1 and re.match(f"error: {message}", error) and error.count("\n") == 1
