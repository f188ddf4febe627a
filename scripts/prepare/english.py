"""English prose of 1945 to 2006 as plain text: news, speeches, film reviews, the Brown corpus.

    python -m scripts.prepare.english --output data/english

Four archives of NLTK's data, 19.6 million characters in 3,000 documents. Their tokenisation and
tags are undone; what is not ASCII is written in ASCII. Documents stay whole. They are drawn into
test.txt and valid.txt (a million characters each) and train.txt, one paragraph a line (of reviews
and the Brown corpus: one sentence), an empty line between documents. The bytes are the same
everywhere: their sha256 is compared. Reviews are in lower case. Licences: the Brown corpus and the
news are for non-commercial use, the speeches are in the public domain, the reviews are CC BY.

scripts.prepare.text binarizes them: --input data/english.
"""

import argparse
import hashlib
import re
import sys
import unicodedata
import zipfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path

from scripts._shared.command_line import exit_status
from scripts._shared.files import write_text
from scripts.prepare._downloads import Archive, add_source_option
from scripts.prepare._stages import file_digest, preparation_parser

ADDRESS = "raw.githubusercontent.com/nltk/nltk_data/gh-pages/packages/corpora"
ARCHIVES = {
    "abc": "129bb6001beb828049a90a59b7dd3c2f0594a47012e48fc5177dfae38e658565",
    "state_union": "366c1dc82b2abf896f42b2ec50ba802a0141a29f75d29ca48a7a243ce5bfbe8d",
    "movie_reviews": "a41211ae685019137410268134db6a1a14428c89b671eb83056151a878539008",
    "brown": "9b275f9b3b95d7bd66ccfb7cd259f445a13bbe5d1f4107aba09fd3e8364bafa6",
}
# sha256 of what this command writes
TEXTS = {
    "train.txt": "0873d619b6f51f488e2d81d0c9518b3282ead05f5ba9814ce4fed0103c49de91",
    "valid.txt": "6ffbf3de1bf93daa6d1afe6b760a9a3a512a3b403771207a9c47577279ffd123",
    "test.txt": "51088de617fe450c2441d620bffb12676dd8531450d3e5c0b84afc70d0bfc20c",
}
# Changes which documents are held out, and their order.
SEED = 1
# Characters of test.txt and of valid.txt: documents are added until there are as many.
HELD_OUT = 1_000_000
# The news do not say where an article with subheadings ends: as many pieces make a document.
PIECES = 20

DOCUMENT_NAMES = re.compile(
    r".*/(c[a-r]\d\d|cv\d+_\d+\.txt|\d{4}-[\w-]+\.txt|(rural|science)\.txt)"
)
IN_ASCII = str.maketrans(
    {
        **{"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--"},
        **{"\u00b0": " degrees ", "\u00ba": " degrees "},
        # spaces and dots that were encoded twice; Windows' punctuation marks without their top bit
        **{"\u00c2": "", "\u0085": "...", "\x05": "...", "\x12": "'", "\x13": ' " ', "\x14": ' " '},
        **{"\x16": "-"},
    }
)


def decode(line: bytes, encoding: str) -> str:
    """Return a line as text, UTF-8 or in the other encoding: files of the news mix the two."""
    try:
        return line.decode()
    except UnicodeDecodeError:
        return line.decode(encoding, "ignore")


def to_ascii(text: str) -> str:
    """Return the text in ASCII: entities of HTML as characters, letters without their accents."""
    text = re.sub(r"&[A-Za-z]+ ?;", lambda name: unescape(name[0].replace(" ", "")), text)
    text = unicodedata.normalize("NFKD", text.translate(IN_ASCII))
    return text.encode("ascii", "ignore").decode()


def join_quotes(line: str, quote: str) -> str:
    """Join lone quotation marks to the words inside them; opening and closing ones alternate."""
    parts = re.split(rf"(?:^|(?<= )){quote}(?= |$)", line)
    joined = parts[0]
    for number, part in enumerate(parts[1:]):
        opens = number % 2 == 0 and part.strip()
        joined = joined + quote + part.lstrip() if opens else joined.rstrip() + quote + part
    return joined


def detokenize(line: str) -> str:
    """Undo the tokenisation of a line: spaces around punctuation marks."""
    line = join_quotes(join_quotes(line, '"'), "'")
    # 1 . 85, 35 , 000, 3 : 40 are numbers; u . s . and p . m . are abbreviations
    line = re.sub(r"(?<=\d) ([.:]|,(?= \d{3}\b)) (?=\d)", r"\1", line)
    line = re.sub(r"(?<=\b[A-Za-z]) \. (?=[A-Za-z] \.)", ".", line)
    line = re.sub(r"([(\[$]) ", r"\1", line)
    line = re.sub(r" +([.,;:?!)\]%]+)", r"\1", line)
    return re.sub(r"(?<=[.?!]) (?=[.?!](?:[ .?!]|$))", "", line)


def without_tags(line: str) -> str:
    """Return the tokens of a line of the Brown corpus, word/tag, with spaces between them."""
    words = []
    for token in line.split():
        word = token.rpartition("/")[0].replace("``", '"').replace("''", '"')
        # full stops after an abbreviation, and ?, ! and ; within a sentence, are there twice
        if not (words and word in (".", "?", "!", ";") and words[-1].endswith(word)):
            words.append(word)
    return " ".join(words)


def documents(archive: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each document of an archive, in no certain order."""
    with zipfile.ZipFile(archive) as members:
        for name in filter(DOCUMENT_NAMES.fullmatch, members.namelist()):
            encoding = "big5" if name.startswith("state_union/") else "latin-1"
            lines = [to_ascii(decode(line, encoding)) for line in members.read(name).splitlines()]
            lines = [" ".join(line.split()) for line in lines]
            if name.startswith("abc/"):
                pieces = re.split(r"\n{2,}", "\n".join(lines).strip())
                for first in range(0, len(pieces), PIECES):
                    yield f"{name} {first}", "\n".join(pieces[first : first + PIECES])
                continue
            if name.startswith("brown/"):
                lines = [detokenize(without_tags(line)) for line in lines]
            elif name.startswith("movie_reviews/"):
                lines = [detokenize(line) for line in lines]
            yield name, "\n".join(filter(None, lines))


def draw(texts: dict[str, str]) -> dict[str, str]:
    """Return the content of each file that is written, of documents by name."""
    # by a hash, which is the same in every version of Python
    names = sorted(texts, key=lambda name: hashlib.sha256(f"{SEED} {name}".encode()).digest())
    parts = {"test.txt": [], "valid.txt": [], "train.txt": []}
    for name in names:
        size = {part: sum(map(len, content)) for part, content in parts.items()}
        part = next(
            (part for part in ("test.txt", "valid.txt") if size[part] < HELD_OUT), "train.txt"
        )
        parts[part].append(f"{texts[name]}\n")
    return {part: "\n".join(content) for part, content in parts.items()}


def prepare(options: argparse.Namespace) -> None:
    """Write the three files, unless they are there."""
    files = {name: options.output / name for name in TEXTS}
    if all(path.exists() and file_digest(path) == TEXTS[name] for name, path in files.items()):
        print(f"{options.output}: complete", flush=True)
        return
    texts = {}
    for name, checksum in ARCHIVES.items():
        archive = Archive(f"{ADDRESS}/{name}.zip", [], f"sha256:{checksum}")
        texts |= documents(archive.path(options))
    for name, content in draw(texts).items():
        digest = hashlib.sha256(content.encode()).hexdigest()
        if digest != TEXTS[name]:
            raise ValueError(f"{name} has sha256 {digest}, expected {TEXTS[name]}: report this")
        files[name].parent.mkdir(parents=True, exist_ok=True)
        write_text(files[name], content)
        print(f"{files[name]}: {len(content):,} characters", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = preparation_parser(__doc__)
    add_source_option(parser, "the four archives")
    options = parser.parse_args(arguments)
    return exit_status(lambda: prepare(options), output=options.output)


if __name__ == "__main__":
    sys.exit(main())
