"""Four archives of NLTK's data as plain text: their tokenisation and tags undone, in ASCII."""

import re
import unicodedata
import zipfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path

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
