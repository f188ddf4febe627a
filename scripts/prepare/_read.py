"""Step 2: read the lines of a corpus's files, or generate them."""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from scripts._shared.commands import short
from scripts.prepare import _english, _generated, _python_source
from scripts.prepare._corpora import SPLITS, Corpus, side_of, texts_of
from scripts.prepare._get import File
from scripts.prepare._lines import progress, read_lines

# Whitespace for str.split() but not for bytes.split(), such as the no-break space.
OTHER_WHITESPACE = re.compile(r"[^\S \t\n\r\v\f]")
# Replaces such whitespace within a word, since fairseq would split the word there.
VISIBLE_SPACE = "\u2423"


@dataclass(frozen=True)
class Text:
    """The lines of a document or a text.

    Args:
        name: name for messages.
        make: function that returns the lines, without line ends.
        part: train, valid, test, test1 and so on, or empty if the split is still to be made.
        language: code of the language, and ending of its files; txt for texts in one language.
        path: the file that has these lines and nothing else, if there is one.
        start: number of the line before the first, for messages.
    """

    name: str
    make: Callable[[], Iterable[str]]
    part: str = ""
    language: str = "txt"
    path: Path | None = None
    start: int = 0

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield each line and its location, for messages."""
        for number, line in enumerate(self.make(), self.start + 1):
            yield line, f"{self.name}, line {number}"


def from_file(path: Path, part: str = "", language: str = "txt") -> Text:
    """Return the text in a file."""
    return Text(short(path), partial(read_lines, path), part, language, path)


def from_string(name: str, content: str, part: str = "", language: str = "txt") -> Text:
    """Return a text of lines that all end with a newline."""
    return Text(name, lambda: content.removesuffix("\n").split("\n"), part, language)


def own_text(files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return the text of --input, or those of a folder: of three parts, or documents by name."""
    source = options.input
    if source.is_file():
        return [from_file(source)]
    texts = texts_of(source)
    if texts.keys().isdisjoint(SPLITS):
        if options.output.is_relative_to(source):
            raise ValueError(
                f"--output {short(options.output)} lies within --input {short(source)}, where its "
                "texts would be taken for documents: give a folder beside it"
            )
        return [from_file(path) for path in texts.values()]
    if missing := [f"{split}.txt" for split in SPLITS if split not in texts]:
        raise ValueError(
            f"--input {short(source)} has {next(iter(texts))}.txt and lacks {', '.join(missing)}: "
            "give all three parts, or a text or folder to be split"
        )
    if options.held_out is not None:
        raise ValueError(
            f"--held-out is {options.held_out}, and --input {short(source)} has all three parts: "
            "leave it out"
        )
    return [from_file(path, split) for split, path in texts.items()]


def own_pairs(files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return the texts PREFIX.LANGUAGE or PREFIX.LANGUAGE.gz of --train, --valid and --test."""
    prefixes = [("train", prefix) for prefix in options.train] + [("valid", options.valid)]
    prefixes += [(f"test{number or ''}", prefix) for number, prefix in enumerate(options.test)]
    texts = []
    for part, prefix in prefixes:
        for language in (options.source_lang, options.target_lang):
            path = side_of(prefix, language)
            if path is None:
                name = f"{prefix.name}.{language}"
                raise ValueError(
                    f"--{part.rstrip('0123456789')} {short(prefix)}: there is no {name} and "
                    f"no {name}.gz: give the prefix that the names of two files, one for "
                    f"each language, have before .{language}"
                )
            texts.append(from_file(path, part, language))
    return texts


def sentences(files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return parallel texts; with --joined, the other two languages are one, marked in English."""
    texts = [from_file(*file) for file in files]
    if not options.joined:
        return texts
    english = {text.part: text for text in texts if text.language == "en"}
    joined = []
    for text in texts:
        if text.language != "en":
            marked = partial(_mark, f"<2{text.language}> ", english[text.part].make)
            joined.append(Text(text.name, marked, text.part, "en"))
            joined.append(replace(text, language="de"))
    return joined


def _mark(mark: str, make: Callable[[], Iterable[str]]) -> Iterator[str]:
    return (f"{mark}{line}" for line in make())


def words(files: list[File], options: argparse.Namespace, ascii_blanks: bool = False) -> list[Text]:
    """Return published words, with single spaces between them.

    With ascii_blanks, only ASCII whitespace separates words, and only newlines end lines.
    """
    return [Text(short(path), partial(_words, path, ascii_blanks), *rest) for path, *rest in files]


def _words(path: Path, ascii_blanks: bool) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n" if ascii_blanks else None) as lines:
        for line in lines:
            if ascii_blanks:
                line = OTHER_WHITESPACE.sub(VISIBLE_SPACE, line)
            yield " ".join(line.split())


def raw_bytes(files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return a text that is not read in lines."""
    return [Text(short(path), tuple, path=path) for path, *_ in files]


def nltk_documents(files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return the documents of NLTK's archives."""
    return [from_string(*document) for path, *_ in files for document in _english.documents(path)]


def python_source(files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return the files of the standard library, or of wheels."""
    if options.packages:
        return [from_string(*source) for source in _python_source.read_wheels(files)]
    return [from_string(*source) for source in _python_source.read_library(options.library)]


def facts(files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return the facts, as two parts."""
    lines = _generated.draw_facts(options.facts, options.seed)
    return [Text("facts", lambda: lines, part) for part in ("train", "valid")]


def number_names(files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return both sides of each part."""
    texts = []
    for part in SPLITS:
        count = getattr(options, part)
        drawn = _generated.sentences(part, count, options.seed)
        pairs = list(progress(drawn, total=count, desc=part, unit=" pairs"))
        for language, lines in zip(_generated.LANGUAGES, zip(*pairs, strict=True), strict=True):
            texts.append(Text("number names", partial(iter, lines), part, language))
    return texts


READERS: dict[str, Callable[[list[File], argparse.Namespace], list[Text]]] = {
    "own text": own_text,
    "own pairs": own_pairs,
    "sentences": sentences,
    "words": words,
    "words between ASCII blanks": partial(words, ascii_blanks=True),
    "bytes": raw_bytes,
    "NLTK": nltk_documents,
    "Python": python_source,
    "facts": facts,
    "number names": number_names,
}


def read(corpus: Corpus, files: list[File], options: argparse.Namespace) -> list[Text]:
    """Return the texts of a corpus, in the order in which they are written."""
    return READERS[corpus["read"]](files, options)
