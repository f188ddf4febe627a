"""Character corpus from the source files of the Python standard library, binarized for fairseq.

    python -m scripts.prepare.python_source --output quickstart/data

OUTPUT/text/{train,valid,test}.txt      the source text itself, files one after the other
OUTPUT/text/{train,valid,test}.chars    the same text as symbols: characters separated by blanks,
                                        the space written as U+2581, a source line on each line
OUTPUT/bin/                             the symbols binarized by fairseq-preprocess
OUTPUT/corpus.json                      Python version, files and characters of each part

fairseq ends each line with </s>, which stands for the newline: tokens and characters are the same
in number. The corpus depends on the Python version, figures compare on the same version only.
"""

import json
import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from scripts._shared.command_line import command_parser
from scripts._shared.commands import short
from scripts.prepare._preprocess import preprocess_command, run_preprocess

SPLITS = ("train", "valid", "test")
SPACE = "\u2581"
PLAIN_TEXT = re.compile(rb"[\n -~]+")
# Tests and installed packages are not the library. encodings holds generated character tables,
# many of them equal but for a line: split by file, the training part would hold the test part.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
MACHINE_SPECIFIC = ("config-", "_sysconfigdata", "sitecustomize")
MINIMUM_FILES = 100
# Larger files always train, so that a few long files cannot make up most of a held-out part.
LARGEST_HELD_OUT_FILE = 40_000
# fairseq stores fewer than 65,500 symbols in 2 bytes each.
BYTES_PER_TOKEN = 2
# fairseq binarizes the first part of a file after the others: 2 workers would work in turn.
WORKERS = 3


def source_files(stdlib: Path) -> list[Path]:
    """Python files of the library below a folder, sorted by their POSIX relative path."""
    files = []
    for folder, subfolders, names in os.walk(stdlib):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in EXCLUDED_FOLDERS and not name.startswith(MACHINE_SPECIFIC)
        ]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith(MACHINE_SPECIFIC)
        ]
    files = [path for path in files if path.is_file()]
    return sorted(files, key=lambda path: path.relative_to(stdlib).as_posix())


def plain_text(path: Path) -> str | None:
    """Text of a file, ended by a newline, or None if it is not all printable ASCII and newlines."""
    content = path.read_bytes()
    if not PLAIN_TEXT.fullmatch(content):
        return None
    text = content.decode("ascii")
    return text if text.endswith("\n") else text + "\n"


def split_of(index: int, length: int) -> str:
    """Part of the file with this index: every 20th tests, every 60th validates, the rest trains."""
    if length > LARGEST_HELD_OUT_FILE:
        return "train"
    if index % 20 == 19:
        return "test"
    return "valid" if index % 60 == 9 else "train"


def read_corpus(stdlib: Path) -> dict[str, list[str]]:
    """Texts of the usable files of each part.

    Raises ValueError when the folder has too few of them.
    """
    corpus: dict[str, list[str]] = {split: [] for split in SPLITS}
    texts = (plain_text(path) for path in source_files(stdlib))
    for index, text in enumerate(text for text in texts if text is not None):
        corpus[split_of(index, len(text))].append(text)
    count = sum(map(len, corpus.values()))
    if count < MINIMUM_FILES:
        raise ValueError(
            f"standard library {stdlib}: {count} usable source files, the corpus needs at least "
            f"{MINIMUM_FILES}: this Python has its library stripped or zipped, run the script "
            "with a Python that has the library's source files"
        )
    return corpus


def check_symbols(texts: dict[str, str]) -> int:
    """Number of symbols of the training text, the newline aside.

    Raises ValueError when a held-out text has a character that the training text lacks.
    """
    known = set(texts["train"])
    for split in SPLITS[1:]:
        unknown = sorted(set(texts[split]) - known)
        if unknown:
            raise ValueError(
                f"{split} text: the characters {unknown} are not in the training text, the model "
                "would see <unk>: run the script with a Python that has the whole library"
            )
    return len(known - {"\n"})


def separate_characters(text: str) -> str:
    """Text as fairseq symbols: characters separated by blanks, the space as U+2581."""
    return "\n".join(" ".join(line) for line in text.replace(" ", SPACE).split("\n"))


def write_texts(texts: dict[str, str], folder: Path) -> None:
    """Write each part as text and as symbols."""
    folder.mkdir()
    for split, text in texts.items():
        (folder / f"{split}.txt").write_text(text, encoding="ascii", newline="\n")
        symbols = separate_characters(text)
        (folder / f"{split}.chars").write_text(symbols, encoding="utf-8", newline="\n")


def binarize(folder: Path, characters: int) -> None:
    """Binarize folder/text into folder/bin with fairseq-preprocess, under a progress bar."""
    texts = {split: folder / "text" / f"{split}.chars" for split in SPLITS}
    # With fairseq's default factor of 8 the dictionary would get made-up symbols.
    command = preprocess_command(texts, folder / "bin", WORKERS, "--padding-factor", "1")
    log = folder / "preprocess.log"
    run_preprocess(
        command, folder / "bin", log, characters, BYTES_PER_TOKEN, description="count, binarize"
    )


def check_tokens(folder: Path, split: str, characters: int) -> None:
    """Check by fairseq-preprocess's log that each character became one known token.

    Raises ValueError when it did not.
    """
    log = folder / "preprocess.log"
    pattern = rf"{split}\.chars: \d+ sents, (\d+) tokens, (\S+)% replaced"
    found = re.search(pattern, log.read_text(encoding="utf-8"))
    tokens, unknown = found.groups() if found else ("no", "no")
    if (tokens, unknown) != (str(characters), "0.0"):
        raise ValueError(
            f"fairseq-preprocess, {split}: {tokens} tokens with {unknown} % unknown for "
            f"{characters} characters, each character must be one known token: "
            f"see {short(log)} and use the fairseq version that this project pins"
        )


def build(folder: Path, stdlib: Path) -> dict:
    """Build the corpus in an existing empty folder and return its description."""
    corpus = read_corpus(stdlib)
    texts = {split: "".join(files) for split, files in corpus.items()}
    symbols = check_symbols(texts)
    write_texts(texts, folder / "text")
    binarize(folder, sum(map(len, texts.values())))
    for split, text in texts.items():
        check_tokens(folder, split, len(text))
    sizes = {
        split: {"files": len(files), "characters": len(texts[split])}
        for split, files in corpus.items()
    }
    description = {"python": platform.python_version(), "symbols": symbols, "splits": sizes}
    (folder / "corpus.json").write_text(json.dumps(description, indent=2) + "\n", encoding="ascii")
    return description


def report(description: dict) -> None:
    """Print the sizes of a corpus."""
    for split, size in description["splits"].items():
        print(f"{split:5} {size['files']:4} files {size['characters']:11,} characters = tokens")
    print(f"{description['symbols']} symbols and </s>, source files of Python", end=" ")
    print(description["python"], flush=True)


def prepare(output: Path, stdlib: Path) -> None:
    """Build the corpus in output, or do nothing if it is there.

    Raises ValueError when output holds something else or cannot be written.
    """
    if (output / "corpus.json").exists():
        print(f"{short(output)} is complete, nothing to do:")
        report(json.loads((output / "corpus.json").read_text(encoding="ascii")))
        return
    if output.exists():
        raise ValueError(
            f"--output {short(output)} exists and is no corpus of this script: "
            "remove it or give another folder"
        )
    partial = output.with_name(output.name + ".partial")
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(
            f"--output {short(output)} cannot be written ({error.strerror}): "
            "give a folder in a place where you may write"
        ) from error
    description = build(partial, stdlib)
    partial.rename(output)
    report(description)


def main() -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, help="folder of the corpus")
    output = parser.parse_args().output.resolve()
    try:
        prepare(output, Path(sysconfig.get_path("stdlib")))
    except KeyboardInterrupt:
        print("\ninterrupted; the corpus will be built anew", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
