r"""Source files of the Python standard library in subword units, binarized for fairseq.

    python -m scripts.prepare.python_source --output quickstart/data

or, with more text, of the packages of a list (_packages.py says what it holds):

    python -m scripts.prepare.python_source --output DATA --subwords 8000 \
        --packages examples/product_key_memory/python_packages.txt

OUTPUT/text/{train,valid,test}.txt      the source text itself, files one after the other
OUTPUT/text/{train,valid,test}.units    the same text in units, a source line on each line
OUTPUT/sentencepiece.model              the units, learned from the training part by byte pair
                                        encoding; they give back every blank of the text
OUTPUT/bin/                             the units binarized by fairseq-preprocess
OUTPUT/preparation.json                 Python version; files, characters and tokens of each part
OUTPUT/../wheels/                       the packages, which pip downloads

fairseq ends each line with </s>, which stands for the newline. The corpus depends on the Python
version, figures compare on the same version only.
"""

import io
import platform
import re
import shutil
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from scripts._shared.command_line import check_at_least, command_parser, exit_status
from scripts._shared.commands import short
from scripts._shared.files import atomic_write
from scripts.prepare._binarize import preprocess, write_units
from scripts.prepare._packages import read_packages
from scripts.prepare._stages import SPLITS, Stages, add_output_option, existing, file_digest

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

MODEL = "sentencepiece.model"
PLAIN_TEXT = re.compile(rb"[\n -~]+")
# Tests and installed packages are not the library. encodings holds generated character tables,
# many of them equal but for a line: split by file, the training part would hold the test part.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
MACHINE_SPECIFIC = ("config-", "_sysconfigdata", "sitecustomize")
MINIMUM_FILES = 100
# Larger files always train, so that a few long files cannot make up most of a held-out part.
LARGEST_HELD_OUT_FILE = 40_000
# Units are learned from so many characters at most, of files taken at equal distances.
LEARNED_FROM = 12_000_000
WORKERS = 2


def source_texts(stdlib: Path) -> Iterator[str]:
    """Texts of the library's Python files in printable ASCII, by their POSIX relative path."""
    for path in sorted(stdlib.rglob("*.py"), key=lambda path: path.relative_to(stdlib).as_posix()):
        names = path.relative_to(stdlib).parts
        if not EXCLUDED_FOLDERS.isdisjoint(names) or any(
            name.startswith(MACHINE_SPECIFIC) for name in names
        ):
            continue
        content = path.read_bytes() if path.is_file() else b""
        if PLAIN_TEXT.fullmatch(content):
            yield content.decode("ascii").removesuffix("\n") + "\n"


def split_of(index: int, length: int) -> str:
    """Part of the file with this index: every 20th tests, every 60th validates, the rest trains."""
    if length > LARGEST_HELD_OUT_FILE:
        return "train"
    if index % 20 == 19:
        return "test"
    return "valid" if index % 60 == 9 else "train"


def read_corpus(stdlib: Path) -> dict[str, list[str]]:
    """Texts of the usable files of each part; raises ValueError when there are too few."""
    corpus: dict[str, list[str]] = {split: [] for split in SPLITS}
    texts = list(source_texts(stdlib))
    if len(texts) < MINIMUM_FILES:
        raise ValueError(
            f"standard library {stdlib}: {len(texts)} usable source files, the corpus needs at "
            f"least {MINIMUM_FILES}: this Python has its library stripped or zipped, run the "
            "script with a Python that has the library's source files"
        )
    for index, text in enumerate(texts):
        corpus[split_of(index, len(text))].append(text)
    return corpus


def sample_of(files: list[str]) -> str:
    """Text of every n-th file, n the least with which it has LEARNED_FROM characters or fewer."""
    step = -(-sum(map(len, files)) // LEARNED_FROM)
    return "".join(files[::step])


def learn_units(text: str, model: Path, subwords: int) -> "SentencePieceProcessor":
    """Learn so many units from a text and write them to a file."""
    import sentencepiece

    learned = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            # not as files, whose names would be in the model
            sentence_iterator=iter(text.splitlines()),
            model_writer=learned,
            model_type="bpe",
            vocab_size=subwords,
            # every character and every blank comes back
            character_coverage=1.0,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            # units may hold several words of a line, such as "return self."
            split_by_whitespace=False,
            split_by_unicode_script=False,
            split_by_number=False,
            max_sentencepiece_length=24,
            # </s> is fairseq's
            bos_id=-1,
            eos_id=-1,
            # more threads would learn other units
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"--subwords is {subwords}: sentencepiece cannot learn so many units from "
            f"{len(text):,} characters ({error}): give another number"
        ) from error
    model.write_bytes(learned.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=learned.getvalue())


def write_in_units(text: str, units: "SentencePieceProcessor", path: Path) -> int:
    """Write a text in units, a line on each line, and return the number of its tokens.

    Raises ValueError when the units do not give back the text.
    """
    ids = units.encode(text.splitlines())
    # a character that training never saw comes back as <unk>
    lines = [" ".join(units.id_to_piece(line)) for line in ids]
    if "\n".join(lines).replace(" ", "").replace("\u2581", " ") + "\n" != text:
        raise ValueError(
            f"{path.stem} text: it has characters that the training text lacks, the model would "
            "see <unk>: run the command with a Python that has the whole library"
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    # and </s> at the end of each
    return sum(len(line) + 1 for line in ids)


def write_dictionary(units: "SentencePieceProcessor", text: Path, path: Path) -> None:
    """Write fairseq's dictionary: all units, the most frequent ones of a text in units first.

    Learning by merges makes units that the text then has as a part of others only, and a held-out
    text may have them: a dictionary of what training has would give <unk> there.
    """
    counts = Counter(text.read_text(encoding="utf-8").split())
    pieces = [units.id_to_piece(index) for index in range(len(units)) if index != units.unk_id()]
    pieces.sort(key=lambda piece: -counts[piece])
    lines = "".join(f"{piece} {counts[piece]}\n" for piece in pieces)
    path.write_text(lines, encoding="utf-8", newline="\n")


def write_corpus(
    read: Callable[[], dict[str, list[str]]], subwords: int, folder: Path
) -> dict[str, dict]:
    """Write the texts, the units and the texts in them; return the sizes of each part."""
    corpus = read()
    texts = {split: "".join(files) for split, files in corpus.items()}
    for split, text in texts.items():
        (folder / f"{split}.txt").write_text(text, encoding="ascii", newline="\n")
    units = learn_units(sample_of(corpus["train"]), folder / MODEL, subwords)
    tokens = {
        split: write_in_units(text, units, folder / f"{split}.units")
        for split, text in texts.items()
    }
    write_dictionary(units, folder / "train.units", folder / "dict.txt")
    return {
        split: {"files": len(files), "characters": len(texts[split]), "tokens": tokens[split]}
        for split, files in corpus.items()
    }


def binarize(text: Path, folder: Path) -> None:
    """Write the folder for fairseq; raises ValueError when a unit is no known token of it."""
    paths = {split: text / f"{split}.units" for split in SPLITS}
    sizes = preprocess(paths, folder, WORKERS, ("--srcdict", short(text / "dict.txt")))
    if unknown := sum(size["unknown"] for size in sizes.values()):
        raise ValueError(
            f"fairseq-preprocess: {unknown} units are unknown, each must be one known token: use "
            "the fairseq version that this project pins"
        )
    write_units(folder, "subwords", "sentencepiece", f"../{MODEL}")


def prepare(output: Path, stdlib: Path, subwords: int, packages: Path | None = None) -> None:
    """Build the corpus of the library, or of a list of packages, or do nothing if it is there."""
    check_at_least(1, subwords=subwords)
    if packages:
        settings = {"packages": file_digest(packages), "subwords": subwords}
        read = partial(read_packages, packages, output.parent / "wheels")
    else:
        settings = {"python": platform.python_version(), "subwords": subwords}
        read = partial(read_corpus, stdlib)
    stages = Stages(output, settings)
    sizes = stages.run("text", partial(write_corpus, read, subwords))
    with atomic_write(output / MODEL) as partial_file:
        shutil.copyfile(output / "text" / MODEL, partial_file)
    stages.run("bin", partial(binarize, output / "text"))
    stages.finish({"splits": sizes})


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add_output_option(parser)
    text = "number of units (default: %(default)s)"
    parser.add_argument("--subwords", type=int, default=2048, metavar="N", help=text)
    text = "list of packages in place of the library"
    parser.add_argument("--packages", type=existing, metavar="FILE", help=text)
    options = parser.parse_args(arguments)
    stdlib = Path(sysconfig.get_path("stdlib"))
    work = partial(prepare, options.output, stdlib, options.subwords, options.packages)
    return exit_status(work, output=options.output)


if __name__ == "__main__":
    sys.exit(main())
