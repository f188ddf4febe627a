"""Text is read from Python as its preparation read it, whatever blanks it has."""

import re
import sys

import numpy as np
import pytest
from fairseq.data import Dictionary
from sentencepiece import SentencePieceProcessor

from fairseq_plugins import load
from fairseq_plugins.python_interface.lines import Characters
from scripts.prepare import __main__ as preparation
from scripts.prepare import _binarize
from scripts.prepare._corpora import read_yaml
from tests import tiny
from tests.end_to_end.commands import run_here
from tests.scripts.evaluate.saved_memory_models import write_translator
from tests.scripts.evaluate.saved_models import write_checkpoint
from tests.scripts.prepare.prepared import SPLITS, lines

BLANKS = [one for one in map(chr, range(sys.maxunicode)) if one.isspace() and one != "\n"]
# blanks of each kind between words, in a row, and at both ends of lines; blank lines; Windows' ends
TEXT = "".join(
    f"{one}low{one}lower, 5{one}% the{one}{one}newest l'eau:{one}!wid-est \u2581 low{one}\n"
    for one in BLANKS
)
TEXT += "\n".join(["", "".join(BLANKS), " low\r", "", "\r", "\u00ab\u00a0lower\u00a0\u00bb\r", ""])


def test_characters_are_decoded_as_they_were():
    characters = Characters()
    assert characters.decode(characters.encode(TEXT)) == TEXT
    assert "<U+0009>" in characters.encode(TEXT)


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch):
    monkeypatch.setattr(_binarize, "run_child", run_here)


def prepare_text(folder, *options):
    for split in SPLITS:
        (folder / f"{split}.txt").write_bytes(TEXT.encode())
    words = ("--input", folder, "--output", folder / "out", "--workers", 1, "--unit", *options)
    assert preparation.main(["text", *map(str, words)]) == 0
    return TEXT


def prepare_bytes(folder):
    content = TEXT.encode()
    (folder / "enwik8").write_bytes(content * 3)
    (source,) = read_yaml("corpora.yaml")["enwik8"]["get"]
    changes = {"vocabulary": len(set(content)), "split": {"bytes": [len(content)] * 3}}
    changes["get"] = [{**source, "texts": {}}]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setitem(read_yaml("corpora.yaml")["enwik8"], name, value)
        words = ("enwik8", "--from", folder / "enwik8", "--newlines", "eos")
        assert preparation.main([*map(str, words), "--output", str(folder / "out")]) == 0
    return TEXT


def prepare_pieces(folder):
    content = re.sub("[^ -~\n]", " ", TEXT)
    library = folder / "library"
    library.mkdir()
    # one file of each part
    for number in range(60):
        (library / f"m{number:02}.py").write_text(content if number in (0, 9, 19) else "\n")
    words = ("python_source", "--pieces", 40, "--workers", 1, "--output", folder / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation.sysconfig, "get_path", lambda name: library)
        assert preparation.main([*map(str, words)]) == 0
    return content + "\n\n"


PREPARATIONS = {
    "words": lambda folder: prepare_text(folder, "words"),
    "split punctuation": lambda folder: prepare_text(folder, "words", "--split-punctuation"),
    "Moses": lambda folder: prepare_text(folder, "words", "--moses", "fr"),
    "subwords": lambda folder: prepare_text(folder, "subwords", "--bpe-size", 9),
    "Moses subwords": lambda folder: prepare_text(
        folder, "subwords", "--bpe-size", 9, "--moses", "en"
    ),
    "characters": lambda folder: prepare_text(folder, "characters"),
    "bytes": prepare_bytes,
    "sentencepiece": prepare_pieces,
    "sentencepiece of raw text": lambda folder: prepare_text(
        folder, "sentencepiece", "--pieces", 320
    ),
}


@pytest.mark.parametrize("kind", PREPARATIONS)
def test_text_has_the_tokens_that_its_preparation_wrote(tmp_path, monkeypatch, kind):
    content, data = PREPARATIONS[kind](tmp_path), tmp_path / "out" / "bin"
    expected = " ".join(lines(data, "test")).split()
    monkeypatch.setattr(tiny, "dictionary", lambda: Dictionary.load(str(data / "dict.txt")))
    write_checkpoint(tmp_path / "model.pt", "transformer_xl", mem_len=5)
    model = load(tmp_path / "model.pt", data)
    score = model.score(content)
    assert score.tokens == expected
    assert "<unk>" not in expected
    np.testing.assert_allclose(-score.log_probs, model.score_split("test"), atol=1e-5)
    stream = model.stream()
    pieces = [stream.score(piece) for piece in re.findall(r"[^\n]*\n", content)]
    assert sum(pieces[1:], pieces[0]).tokens == expected
    first = content.partition("\n")[0]
    (best,) = model.hypotheses(first, 1)
    assert best.tokens[:-1] == model.score(first).tokens == expected[: len(best.tokens) - 1]
    if kind == "subwords":
        codes = (tmp_path / "out" / "bpe" / "codes").read_text(encoding="utf-8").splitlines()
        (tmp_path / "fast").write_text("".join(f"{pair} 0\n" for pair in codes[1:]))
        fast = {"bpe": "fastbpe", "bpe_codes": str(tmp_path / "fast")}
        assert load(tmp_path / "model.pt", data, **fast).score(content).tokens == expected


def test_pieces_of_raw_text_keep_every_character(tmp_path):
    prepare_text(tmp_path, "sentencepiece", "--pieces", 320)
    # of a character that training lacks, too; only the mark of a space becomes one
    written = TEXT.replace("low", "\U0001f600")
    (tmp_path / "test.txt").write_bytes(written.encode())
    options = ("--unit", "sentencepiece", "--pieces", 320, "--workers", 1)
    words = ("--input", tmp_path, "--output", tmp_path / "again", *options)
    assert preparation.main(["text", *map(str, words)]) == 0
    processor = SentencePieceProcessor(
        model_file=str(tmp_path / "again" / "pieces" / "sentencepiece.model")
    )
    read = [line.split()[:-1] for line in lines(tmp_path / "again" / "bin", "test")]
    expected = written.replace("\r\n", "\n").replace("\u2581", " ").removesuffix("\n").split("\n")
    assert [processor.decode(pieces) for pieces in read] == expected


def test_what_a_dictionary_of_characters_lacks_is_unknown(tmp_path, monkeypatch):
    """Also the symbol of the space, and whitespace that training lacks."""
    for split, content in {"train": "a b\n", "valid": "a\n", "test": "a \u2581\tb\n"}.items():
        (tmp_path / f"{split}.txt").write_text(content)
    words = ("--input", tmp_path, "--output", tmp_path / "out", "--unit", "characters")
    assert preparation.main(["text", *map(str, words), "--workers", "1"]) == 0
    data = tmp_path / "out" / "bin"
    monkeypatch.setattr(tiny, "dictionary", lambda: Dictionary.load(str(data / "dict.txt")))
    write_checkpoint(tmp_path / "model.pt", "transformer_xl", mem_len=5)
    tokens = load(tmp_path / "model.pt", data, allow_unknown=True).score("a \u2581\tb\n").tokens
    assert tokens == lines(data, "test")[0].split() == "a \u2581 <unk> <unk> b </s>".split()
    with pytest.raises(ValueError, match=r"'<U\+0009>', '<U\+2581>'"):
        load(tmp_path / "model.pt", data).score("a \u2581\tb\n")


@pytest.mark.parametrize("hyphens", ["--aggressive-hyphens", "--no-aggressive-hyphens"])
def test_pairs_have_the_tokens_that_their_preparation_wrote(tmp_path, monkeypatch, hyphens):
    """Each side by the rules of its language, with uniform punctuation."""
    words = ["--source-lang", "en", "--target-lang", "fr", "--output", tmp_path / "out", hyphens]
    for language in ("en", "fr"):
        (tmp_path / f"text.{language}").write_bytes(TEXT.encode())
    for part in ("train", "valid", "test"):
        words += [f"--{part}", tmp_path / "text"]
    words += ["--bpe-size", 9, "--workers", 1, "--max-ratio", 9]
    assert preparation.main(["translation", *map(str, words)]) == 0
    data = tmp_path / "out" / "bin"
    monkeypatch.setattr(tiny, "dictionary", lambda: Dictionary.load(str(data / "dict.en.txt")))
    write_translator(tmp_path / "model.pt", source_lang="en", target_lang="fr")
    model, sentences = load(tmp_path / "model.pt", data), TEXT.split("\n")[:-1]
    scores = model.score(sentences, sentences)
    expected = lines(data, "test.en-fr.fr", "dict.fr.txt")
    assert [" ".join(score.tokens) for score in scores] == expected
    sources = [model.source.symbols(model.encode(model.source, x, "")) for x in sentences]
    expected = lines(data, "test.en-fr.en", "dict.en.txt")
    assert [" ".join(source) for source in sources] == expected
    assert "<unk>" not in " ".join(expected)
    losses = np.concatenate([-score.log_probs for score in scores])
    np.testing.assert_allclose(losses, model.score_split("test"), atol=1e-5)
