"""Step 4: write texts as symbols: words, characters, units of byte pair encoding, or pieces.

Moses tokens are escaped (``&`` is ``&amp;``, ``<`` is ``&lt;``), so that fairseq takes no token for
a special symbol; sacremoses' MosesDetokenizer undoes that. All BPE units of a word but the last end
with ``@@`` (Sennrich et al. 2016); removing ``@@ `` (fairseq's --remove-bpe) restores the words.

Pieces of sentencepiece keep every character and blank but U+2581, which becomes a space. Whitespace
other than the space, which fairseq would take for a separator, and characters that training lacks
become bytes such as ``<0xE2>``, so that no text has an unknown symbol.
"""

import argparse
import io
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from itertools import chain, islice
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from fairseq_plugins.python_interface.lines import Characters, Moses, Words, space_symbol
from scripts._shared.commands import short
from scripts._shared.files import write_text
from scripts.prepare._corpora import Corpus
from scripts.prepare._lines import (
    SPECIAL,
    LineMapper,
    progress,
    read_lines,
    write_lines,
)
from scripts.prepare._read import Text
from scripts.prepare._split import Parts, count_characters

VERSION = "#version: 0.2"
# Most words whose units are remembered; a large text would fill the memory with rare words.
REMEMBERED = 2**20
MODEL = "sentencepiece.model"
# Pieces are learned from about this many characters at most.
LEARNING_CHARACTERS = 12_000_000
OTHER_BLANKS = re.compile(r"[^\S ]")
PIECE_OPTIONS: dict[str, Any] = {
    "model_type": "bpe",
    # preserve every character and all whitespace; fairseq adds its own <s> and </s>
    "character_coverage": 1.0,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "bos_id": -1,
    "eos_id": -1,
    "byte_fallback": True,
    # sentencepiece leaves out longer lines, 4,192 bytes by default
    "max_sentence_length": 2**30,
    # with more threads the pieces would differ
    "num_threads": 1,
    "minloglevel": 2,
}


def check_language(language: str, option: str = "language") -> None:
    """Raise ValueError for a language without Moses rules: sacremoses would use English's."""
    from sacremoses.corpus import NonbreakingPrefixes

    known = sorted(set(NonbreakingPrefixes().available_langs.values()))
    if language not in known:
        raise ValueError(
            f"--{option} is {language}, for which sacremoses has no rules: give one of "
            f"{', '.join(known)}"
        )


def moses_tokenizer(
    language: str, normalize: bool = False, aggressive_hyphens: bool = False
) -> LineMapper:
    """Return a function from lines to lines of Moses tokens; options are those of ``Moses``."""
    encode = Moses(language, normalize, aggressive_hyphens).encode
    return lambda lines: [encode(line) for line in lines]


def text_characters(options: argparse.Namespace) -> Characters:
    """Return what splits lines into characters, with the space as --srcdict has it, if given."""
    entries = read_lines(options.srcdict) if options.srcdict else ()
    return Characters({" ": space_symbol([entry.rpartition(" ")[0] for entry in entries])})


def character_symbols(characters: Characters) -> LineMapper:
    """Return a function from lines to lines of their characters, separated by single spaces."""
    encode = characters.encode
    return lambda lines: [" ".join(encode(line)) for line in lines]


def check_words(words: str, location: str, subwords: bool = False) -> None:
    """Refuse words, separated by single spaces, one of which is a special symbol of fairseq.

    With subwords, none may contain one, which could become a unit. Errors name the location.
    """
    special = [symbol for symbol in SPECIAL if symbol in words.split(" ")]
    if subwords:
        special = [symbol for symbol in (*SPECIAL, "<unk>") if symbol in words]
    if special:
        raise ValueError(
            f"{location}: {special[0]} is a special symbol of fairseq, which would not be read as "
            f"text: write it in another way, such as [{special[0].strip('<>')}], or give --moses "
            "LANGUAGE, which escapes it"
        )


def lines_of(
    texts: list[Text], size: dict[str, int], change: Callable[[str, str], str] | None = None
) -> Iterator[str]:
    """Yield the lines of texts, changed by a function of a line and its location, if given.

    They are counted in size before: their "characters" with line ends, "lines" and "words".
    """
    size |= {"characters": 0, "lines": 0, "words": 0}
    for text in texts:
        for line, location in text.lines():
            size["characters"] += len(line) + 1
            size["lines"] += 1
            size["words"] += len(line.split())
            yield change(line, location) if change else line


def write_tokens(
    corpus: Corpus, parts: Parts, options: argparse.Namespace, folder: Path
) -> dict[str, dict[str, Any]]:
    """Write the words or characters of each text; return their sizes by part and language."""
    folder.mkdir()
    print(f"write {'characters' if options.unit == 'characters' else 'words'}", flush=True)
    split_words = Words(punctuation=options.split_punctuation).words

    def words(line: str, location: str) -> str:
        line = split_words(line)
        # nobody can change published words
        if "get" not in corpus:
            check_words(line, location, options.unit == "subwords")
        return line

    sizes: dict[str, dict[str, Any]] = {}
    for part, sides in parts.items():
        for language, texts in sides.items():
            size = sizes.setdefault(part, {})[language] = {}
            target = folder / f"{part}.{language}"
            if options.unit == "characters":
                characters = (character_symbols, text_characters(options))
                work = (lines_of(texts, size), target, options.workers, *characters)
            elif language != "txt":
                # True: normalize punctuation
                moses = (moses_tokenizer, language, True, options.aggressive_hyphens)
                work = (lines_of(texts, size), target, options.workers, *moses)
            elif options.moses:
                moses = (moses_tokenizer, options.moses)
                work = (lines_of(texts, size), target, options.workers, *moses)
            else:
                # one process: lines are words already
                work = (lines_of(texts, size, words), target, 1, lambda: list)
            size |= write_lines(*work)
    return sizes


def check_sizes(parts: Parts, sizes: dict[str, dict[str, Any]]) -> None:
    """Raise ValueError if a text is empty, or the sides of a part differ in their lines."""
    for part, sides in sizes.items():
        names = {
            language: ", ".join(text.name for text in texts[:3] if text.name)
            for language, texts in parts[part].items()
        }
        for language, size in sides.items():
            if not size["words"]:
                raise ValueError(
                    f"the {part} part has no text ({names[language]}): give files with text"
                )
        if len({size["lines"] for size in sides.values()}) > 1:
            counts = [f"{names[code]} has {size['lines']:,} lines" for code, size in sides.items()]
            raise ValueError(
                f"the {part} part: {', '.join(counts)}: give files whose lines are translations of "
                "each other"
            )


def learn_codes(sources: Sequence[Path], size: int, codes: Path) -> None:
    """Learn BPE codes from several tokenized texts jointly and write them to a new file.

    There are fewer than ``size`` if no further pair occurs twice.
    """
    from subword_nmt.learn_bpe import learn_bpe

    lines = chain.from_iterable(map(read_lines, sources))
    learned = io.StringIO()
    # learn_bpe prints a progress bar even to a log, and raises ValueError if there are no pairs
    with (
        nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()),
        suppress(ValueError),
    ):
        learn_bpe(progress(lines, desc="count words", unit=" lines"), learned, size)
    if learned.getvalue().count("\n") < 2:
        raise ValueError(
            f"{', '.join(path.name for path in sources)}: no pair of characters occurs twice "
            "within words, so there are no codes to learn: give more text"
        )
    codes.write_text(learned.getvalue(), encoding="utf-8", newline="\n")


def check_codes(path: Path) -> int:
    """Return the number of merges in a file of BPE codes; raise ValueError for any other file."""
    first, *pairs = list(read_lines(path)) or [""]
    wrong = [pair for pair in pairs if len(pair.split(" ")) != 2]
    if first != VERSION or not pairs or wrong:
        raise ValueError(
            f"{short(path)} is not a file of codes: give one that begins with {VERSION!r} and has "
            "a pair of units on each further line, as subword-nmt writes it"
        )
    return len(pairs)


def word_encoder(codes: Path) -> Callable[[list[str]], list[str]]:
    """Return a function from words to their units: of fastBPE if it is installed, or subword-nmt.

    Both give the same units. Without fastBPE, rare words of a large text take hours.
    """
    with suppress(ImportError):
        from fastBPE import fastBPE

        # fastBPE reads a count after each pair, and no first line
        with NamedTemporaryFile("w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{pair} 0\n" for pair in list(read_lines(codes))[1:])
            file.flush()
            return fastBPE(file.name, "").apply
    from subword_nmt.apply_bpe import BPE

    with codes.open(encoding="utf-8-sig") as file:
        encoder = BPE(file)

    def encode(words: list[str]) -> list[str]:
        encoder.cache.clear()  # apply_lines remembers words
        return [encoder.process_line(word) for word in words]

    return encode


def subword_units(codes: Path) -> LineMapper:
    """Return a function from lines of words, with single spaces, to lines of their units."""
    encode = word_encoder(codes)
    units = {"": ""}

    def apply_lines(lines: list[str]) -> list[str]:
        if len(units) > REMEMBERED:
            units.clear()
            units[""] = ""
        new = list({word for line in lines for word in line.split(" ")}.difference(units))
        units.update(zip(new, encode(new), strict=True))
        return [" ".join([units[word] for word in line.split(" ")]) for line in lines]

    return apply_lines


def _refuse_joiners(path: Path) -> Iterator[str]:
    """Yield the lines of a tokenized text; raise ValueError for a word that ends with @@."""
    for number, line in enumerate(read_lines(path), 1):
        if "@@ " in f"{line} ":
            raise ValueError(
                f"{path.name}, line {number}: a word ends with @@, which marks a unit within a "
                "word: change the word"
            )
        yield line


def write_subwords(tokens: Path, parts: Parts, options: argparse.Namespace, folder: Path) -> int:
    """Learn codes from the training texts, unless --bpe-codes is given; write all texts as units.

    Returns the number of merges.
    """
    folder.mkdir()
    codes = folder / "codes"
    if options.bpe_codes:
        shutil.copyfile(options.bpe_codes, codes)
    else:
        print(f"learn {options.bpe_size:,} merges", flush=True)
        learn_codes([tokens / f"train.{code}" for code in parts["train"]], options.bpe_size, codes)
    print("write subword units", flush=True)
    for name in [f"{part}.{code}" for part, sides in parts.items() for code in sides]:
        lines = _refuse_joiners(tokens / name)
        write_lines(lines, folder / name, options.workers, subword_units, codes)
    return check_codes(codes)


def learn_pieces(lines: Iterable[str], number: int, **options: Any) -> bytes:
    """Return a model of sentencepiece with a number of pieces."""
    import sentencepiece

    options = {name: x for name, x in {**PIECE_OPTIONS, **options}.items() if x is not None}
    learned, characters = io.BytesIO(), 0

    def counted() -> Iterator[str]:
        nonlocal characters
        for line in lines:
            characters += len(line)
            yield OTHER_BLANKS.sub(" ", line)

    try:
        sentencepiece.SentencePieceTrainer.train(
            # not from files, whose names would be in the model
            sentence_iterator=counted(),
            model_writer=learned,
            vocab_size=number,
            **options,
        )
    except RuntimeError as error:
        # "Vocabulary size is smaller than required_chars. 90 vs 351"
        fewest = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        remedy = f"give at least {fewest[1]}" if fewest else "give a smaller number"
        raise ValueError(
            f"--pieces is {number}, which sentencepiece cannot learn from {characters:,} "
            f"characters ({error}): {remedy}"
        ) from error
    return learned.getvalue()


def piece_units(model: Path) -> LineMapper:
    """Return a function from lines to lines of their pieces, separated by single spaces."""
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    return lambda lines: [" ".join(pieces) for pieces in processor.encode(lines, out_type=str)]


def sample(texts: list[Text], whole_texts: bool) -> Iterable[str]:
    """Return lines at regular intervals, or those of texts, to learn pieces from."""
    step = max(1, -(-sum(map(count_characters, texts)) // LEARNING_CHARACTERS))
    chosen = texts[::step] if whole_texts else texts
    lines = chain.from_iterable(text.make() for text in chosen)
    return lines if whole_texts else islice(lines, 0, None, step)


def write_pieces(
    corpus: Corpus, parts: Parts, options: argparse.Namespace, folder: Path
) -> dict[str, dict[str, Any]]:
    """Learn pieces on the training part; write all texts as pieces, the model, and dict.txt."""
    import sentencepiece

    folder.mkdir()
    model, rules = folder / MODEL, dict(corpus.get("pieces", {}))
    lines = sample(parts["train"]["txt"], rules.pop("from_whole_texts", False))
    print(f"learn {options.pieces:,} pieces", flush=True)
    model.write_bytes(learn_pieces(lines, options.pieces, **rules))
    print("write pieces", flush=True)
    sizes = {}
    for part, sides in parts.items():
        size: dict[str, int] = {}
        text = lines_of(sides["txt"], size)
        write_lines(text, folder / f"{part}.txt", options.workers, piece_units, model)
        sizes[part] = {"txt": size}
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    pieces = [processor.id_to_piece(index) for index in range(len(processor))]
    if special := [symbol for symbol in SPECIAL if symbol in pieces]:
        raise ValueError(
            f"{special[0]} is a special symbol of fairseq, and so frequent in the text that it "
            f"became a piece: write it in another way, such as [{special[0].strip('<>')}]"
        )
    counts: Counter[str] = Counter()
    for line in read_lines(folder / "train.txt"):
        counts.update(line.split(" "))
    # all pieces, even those that are only parts of others in training: held-out text may have them
    pieces = [piece for piece in pieces if piece != "<unk>"]
    pieces.sort(key=lambda piece: -counts[piece])
    write_text(folder / "dict.txt", "".join(f"{piece} {counts[piece]}\n" for piece in pieces))
    return sizes
