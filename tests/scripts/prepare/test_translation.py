"""Parallel texts: own ones whose pairs can be told apart, and archives like the published ones."""

import gzip
import hashlib
import json
import re
from functools import partial

import pytest
from sacremoses import MosesDetokenizer

from scripts.prepare._lines import read_lines
from tests.scripts.prepare.prepared import contents, lines, tarred, write_files
from tests.scripts.refusals import refused

LANGUAGES = ("en", "de")
# Pairs that must be left out of training, by the reason.
BLANK, LONG, TWICE = {(3, "en"): "", (4, "de"): "\x07 "}, (5, 16), ((7, "en"), (18, "de"))
BAD = {3, 4, 5, 16, 7, 18}
PARTS = {"train": range(25), "valid": (3, 5, 7, 30, 31), "test": (4, 16, 18, 40, 41, 42)}
PARTS["test1"] = PARTS["valid"]


def sentence(number, language):
    """Return a sentence of pair NUMBER; the word xNUMBERx is in both languages."""
    if (number, language) in BLANK:
        return BLANK[number, language]
    times = 5 if number in LONG else 2 if (number, language) in TWICE else 1
    plain = {
        "en": f"The x{number:03}x well-known cat sat, isn't it?",
        "de": f"Die x{number:03}x wohl-bekannte Katze saß, nicht wahr?",
    }
    return " ".join([plain[language]] * times)


def write(folder, name, numbers):
    for language in LANGUAGES:
        content = "".join(f"{sentence(number, language)}\n" for number in numbers)
        write_files(folder, {name.format(language): content})


@pytest.fixture
def folder(tmp_path):
    write(tmp_path, "one.{}", range(10))
    write(tmp_path, "two.{}.gz", range(10, 25))
    write(tmp_path, "dev.{}", PARTS["valid"])
    write(tmp_path, "new.{}.gz", PARTS["test"])
    return tmp_path


@pytest.fixture
def prepare_own(prepare, folder):
    words = ["--source-lang", "en", "--target-lang", "de"]
    words += ["--train", folder / "one", folder / "two", "--valid", folder / "dev"]
    words += ["--test", folder / "new", folder / "dev", "--workers", 1]
    return partial(prepare, "translation", *words, "--bpe-size", 120, "--max-length", 40)


def read_pairs(folder, part):
    return list(zip(*(read_lines(folder / f"{part}.{code}") for code in LANGUAGES), strict=True))


def joined(line):
    return line.replace("@@ ", "")


def pair_number(line):
    (number,) = set(re.findall(r"x(\d{3})x", joined(line)))
    return int(number)


def test_pairs_stay_together_from_the_texts_to_what_fairseq_reads(prepare_own, folder):
    status, _, error = prepare_own()
    assert (status, error) == (0, "")
    out = folder / "out"
    description = json.loads((out / "preparation.json").read_text(encoding="utf-8"))
    for part, numbers in PARTS.items():
        tokens, units = read_pairs(out / "tokens", part), read_pairs(out / "bpe", part)
        assert [tuple(map(joined, pair)) for pair in units] == tokens
        for number, pair in zip(numbers, units, strict=True):
            assert [pair_number(line) for line in pair if line] == [number] * (2 - pair.count(""))
        if part in ("train", "valid"):
            units = read_pairs(out / "clean", part)
            numbers = [number for number in numbers if number not in BAD]
            assert [tuple(map(pair_number, pair)) for pair in units] == [(n, n) for n in numbers]
        sides = [lines(out / "bin", f"{part}.en-de.{one}", f"dict.{one}.txt") for one in LANGUAGES]
        sizes = description["parts"][part]
        assert (sizes["pairs"], sizes["kept"]) == (len(PARTS[part]), len(numbers))
        for language, binarized, side, words in zip(
            LANGUAGES, sides, zip(*units, strict=True), zip(*tokens, strict=True), strict=True
        ):
            for line, symbols in zip(side, binarized, strict=True):
                assert f"{line} </s>".strip() == symbols or "<unk>" in symbols
            assert sizes[language]["tokens"] == len(" ".join(binarized).split())
            assert sizes[language]["unknown"] == " ".join(binarized).count("<unk>")
            assert sizes[language]["words"] == len(" ".join(words).split())
    train = description["parts"]["train"]
    assert [train[key] for key in ("empty", "too_long", "too_unequal")] == [2, 2, 2]
    joint = (out / "bin" / "dict.en.txt").read_text(encoding="utf-8")
    assert joint == (out / "bin" / "dict.de.txt").read_text(encoding="utf-8")
    trained = " ".join(line for pair in read_pairs(out / "clean", "train") for line in pair)
    assert {line.split()[0] for line in joint.splitlines()} == set(trained.split())
    for part, source in (("test", "new.{}.gz"), ("test1", "dev.{}")):
        for language in LANGUAGES:
            references = list(read_lines(out / "references" / f"{part}.{language}"))
            assert references == list(read_lines(folder / source.format(language)))
            detokenize = MosesDetokenizer(lang=language).detokenize
            units = read_lines(out / "bpe" / f"{part}.{language}")
            back = [detokenize(joined(line).split()) for line in units]
            assert back == [line.strip("\x07 ") for line in references]
    assert "well @-@ known" in (out / "tokens" / "train.en").read_text()
    units = json.loads((out / "bin" / "units.json").read_text())
    names = ("unit", "bpe", "tokenizer", "moses_no_dash_splits")
    assert [units[name] for name in names] == ["subwords", "subword_nmt", "moses", False]
    assert (out / "bin" / units["model"]).resolve() == out / "bpe" / "codes"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--target-lang en", "--target-lang"),
        ("--max-length 2", "--max-length 2"),
        ("--train {}/short", "the train part: {}/short.en has 10 lines"),
        ("--valid {}/blank", "the valid part has no text ({}/blank.en)"),
        ("--train {}/no", "--train {}/no"),
    ],
)
def test_prepare_translation_refuses_unusable_inputs_and_options(
    prepare_own, folder, options, named
):
    write_files(folder, {"short.en": "a b\n" * 10, "short.de": "a b\n" * 2})
    write_files(folder, {"blank.en": " \n\x07\n", "blank.de": "a\nb\n"})
    result = prepare_own(*options.replace("{}", str(folder)).split())
    assert refused(result, named.replace("{}", str(folder))), result
    assert not list(folder.glob("out*"))


def test_multi30k_is_text_or_one_pair_whose_languages_are_marked(prepare, corpora, tmp_path):
    def text(part, language):
        return f"{part} one {language}\n{part} two {language}\n"

    for source in corpora["multi30k"]["get"]:
        for name in source["texts"]:
            content = text(*name.split("."))
            write_files(tmp_path / "archives", {f"{name}.gz": content})
            source["texts"][name] = f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
    words, out = ("--from", tmp_path / "archives", "--workers", 1), tmp_path / "out"
    assert prepare("multi30k", *words)[0] == 0
    codes = ("en", "de", "fr")
    names = {f"text/{part}.{code}" for part in ("train", "valid", "test") for code in codes}
    assert set(contents(out)) == {*names, "preparation.json"}
    assert (out / "text/valid.fr").read_text() == text("val", "fr")
    options = ("--unit", "subwords", "--bpe-size", 9, "--max-ratio", 9, "--joined")
    joint = tmp_path / "joint"
    assert prepare("multi30k", *words, *options, "--output", joint)[0] == 0
    english = text("val", "en").splitlines(keepends=True)
    marked = [f"<2{code}> {line}" for code in ("de", "fr") for line in english]
    assert (joint / "text/valid.en").read_text() == "".join(marked)
    assert (joint / "text/valid.de").read_text() == text("val", "de") + text("val", "fr")
    assert len(lines(joint / "bin", "train.en-de.de", "dict.de.txt")) == 4
    write_files(tmp_path / "archives", {"val.en.gz": "changed"})
    assert refused(prepare("multi30k", *words, "--output", tmp_path / "other"), "val.en")


SENTENCES = ("First & last.", "The  second\u00a0one \tends here.", "A third <hl> & 3 > 2.")


def numbered(name, language):
    return "".join(f"{name} {language} sentence {number} sat.\n" for number in range(4))


def sgm(kind, language):
    lines = [f'<{kind}set setid="newstest2014" srclang="any">']
    for document, sentences in enumerate((SENTENCES[:2], SENTENCES[2:]), 1):
        lines += [f'<doc sysid="x" docid="d{document}" origlang="en">', "<p>"]
        lines += [f'<seg id="1">{language}: {sentence}</seg>' for sentence in sentences]
        lines += ["</p>", "</doc>"]
    return "\n".join([*lines, f"</{kind}set>\n"])


@pytest.mark.parametrize("pair", ["en-de", "en-fr"])
def test_wmt14_has_the_texts_of_each_pair(prepare, corpora, tmp_path, pair):
    out, languages, names = tmp_path / "out", pair.split("-"), []
    for source in corpora["wmt14"]["get"]:
        (member,), archive = source["members"], source["address"].rpartition("/")[2]
        name, files = member.split(".")[0].split("-v")[0], {"README": b"other"}
        for side, language in zip(("src", "ref"), languages, strict=True):
            file = member.format(other=languages[1], language=language)
            data = numbered(name, language)
            if "sacrebleu" in source:
                # sacrebleu finds these files by their full names
                file = f"../test-full/newstest2014-{languages[1]}en-{side}.{language}.sgm"
                data = sgm(side, language)
            data = data.encode()
            files[file] = gzip.compress(data) if file.endswith(".gz") else data
        content = tarred(files, "w:gz" if archive.endswith("gz") else "w")
        if "sum" in source:
            source["sum"] = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if source.get("pair", pair) == pair:
            write_files(tmp_path / "archives", {archive: content})
            names += [name] if "train" in source["members"].values() else []
    words = ("--bpe-size", 30, "--workers", 1, "--pair", pair, "--from", tmp_path / "archives")
    status, _, error = prepare("wmt14", *words)
    assert (status, error) == (0, "")
    assert len(names) == (3 if pair == "en-de" else 5)
    for language in languages:
        expected = "".join(numbered(name, language) for name in names)
        tokens = (out / "tokens" / f"train.{language}").read_text()
        # the hyphen of a name is a token of its own
        assert tokens.replace(" @-@ ", "-").replace(" .", ".") == expected
        references = out / "references"
        assert (references / f"test1.{language}").read_text() == numbered("newstest2013", language)
        assert (references / f"test.{language}").read_text() == "".join(
            f"{language}: {' '.join(sentence.split())}\n" for sentence in SENTENCES
        )
    description = json.loads((out / "preparation.json").read_text())
    parts = {part: sizes["pairs"] for part, sizes in description["parts"].items()}
    assert parts == {"train": 4 * len(names), "valid": 4, "test": 3, "test1": 4}
    assert (out / "bin" / f"test1.{pair}.en.idx").exists()
