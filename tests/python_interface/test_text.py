"""Text becomes symbols and text again: characters, bytes, words, Moses and BPE."""

import io
import re
import sys

import pytest
import sentencepiece
from fairseq.data import Dictionary

from fairseq_plugins.python_interface.text import TextCoder, build_lines
from fairseq_plugins.units import Units, loss_unit, read_units

WORDS = "the cat sat on a mat and the dogs ran home"


def dictionary(symbols):
    made = Dictionary()
    for symbol in symbols:
        made.add_symbol(symbol)
    return made


def build(tokenizer, bpe, options):
    return build_lines(tokenizer, bpe, options, Units(), [dictionary("")])[0]


def coder(symbols, units):
    known = dictionary(symbols)
    return TextCoder(known, *build_lines(None, None, {}, units, [known]))


@pytest.mark.parametrize(
    ("symbols", "units", "text", "expected"),
    [
        ("ab▁", Units("characters"), "a b\nb", "a ▁ b </s> b"),
        (
            ["a", "▁", "<U+00A0>"],
            Units("characters", symbols={" ": "▁", "\xa0": "<U+00A0>"}),
            "a \xa0a",
            "a ▁ <U+00A0> a",
        ),
        (["65", "32", "195", "164", "0"], Units("bytes"), "A ä\n\n", "65 32 195 164 </s> </s>"),
        # symbols that could also be bytes or characters
        (list(map(str, range(128))), Units(), "3 10 17\n127", "3 10 17 </s> 127"),
        ("ACGT", Units(), "A C\nG T\n", "A C </s> G T </s>"),
        (WORDS.split(), Units(), "the cat\nsat on\n", "the cat </s> sat on </s>"),
    ],
)
def test_a_unit_says_what_a_symbol_is(symbols, units, text, expected):
    made = coder(symbols, units)
    tokens = made.encode(text)
    assert made.symbols(tokens) == expected.split()
    assert made.decode(tokens) == text


def test_units_are_checked(tmp_path):
    assert read_units(tmp_path) == Units("words")
    path = tmp_path / "units.json"
    for text, message in (
        ('{"unit": "letters"}', r"unit in .*units.json is 'letters': there are characters, bytes"),
        ("{", "units.json cannot be read"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_units(tmp_path)
    assert [loss_unit(unit) for unit in ("bytes", "words")] == ["bits per character", "perplexity"]


def test_words_are_split_by_moses_and_bpe(tmp_path, monkeypatch):
    codes = tmp_path / "codes"
    codes.write_text("#version: 0.2\nt h\nth e</w>\na t</w>\n", encoding="utf-8")
    lines = build("moses", "subword_nmt", {"bpe_codes": str(codes), "moses_no_escape": True})
    coder = TextCoder(dictionary(["the", "c@@", "at", "'@@", "s", "m@@", "!"]), lines)
    tokens = coder.encode("the cat's mat!")
    assert coder.symbols(tokens) == "the c@@ at '@@ s m@@ at !".split()
    assert coder.decode(tokens) == "the cat's mat!"
    # a missing library is named
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    message = "tokenizer is 'moses' .*sacremoses.*: install its library"
    with pytest.raises(ValueError, match=message):
        build("moses", None, {})


def test_the_sides_of_a_translation_share_one_bpe(tmp_path):
    (tmp_path / "codes").write_text("#version: 0.2\nt h\n", encoding="utf-8")
    options = {"bpe_codes": str(tmp_path / "codes"), "source_lang": "en", "target_lang": "de"}
    sides = [dictionary("")] * 2
    source, target = build_lines("moses", "subword_nmt", options, Units(), sides)
    assert source.bpe is target.bpe
    # an abbreviation in German alone
    assert (source.words("bzw. A"), target.words("bzw. A")) == ("bzw . A", "bzw. A")


def test_sentencepiece_keeps_blanks_at_the_start_of_a_line(tmp_path):
    path, made = tmp_path / "model", io.BytesIO()
    as_it_is = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS, "def f(x):", "    return x"] * 9),
        model_writer=made,
        **{"vocab_size": 60, "model_type": "bpe", "hard_vocab_limit": False},
        **{"add_dummy_prefix": False, **as_it_is},
    )
    path.write_bytes(made.getvalue())
    lines = build(None, "sentencepiece", {"sentencepiece_model": str(path)})
    text = "def f(x):\n    return x"
    symbols = {symbol for line in text.split("\n") for symbol in lines.encode(line)}
    coder = TextCoder(dictionary([*sorted(symbols), "unused"]), lines)
    tokens = coder.encode(text)
    assert coder.symbols(tokens).count("</s>") == 1
    assert coder.decode(tokens) == text


def test_unknown_symbols_are_refused_or_counted_as_unk():
    coder = TextCoder(dictionary(WORDS.split()))
    message = "text 3 has symbols that the dictionary lacks ('bird', 'red'): write it in symbols"
    with pytest.raises(ValueError, match=r"count them as <unk> with load\(…, allow_unknown=True\)"):
        coder.encode("the red bird")
    with pytest.raises(ValueError, match=re.escape(message)):
        coder.encode("the red bird sat on the red bird", "text 3")
    # prepared texts of words have <unk>
    assert coder.symbols(coder.encode("the <unk> sat")) == "the <unk> sat".split()
    coder = TextCoder(dictionary(WORDS.split()), allow_unknown=True)
    assert coder.symbols(coder.encode("the red bird")) == "the <unk> <unk>".split()
    with pytest.raises(ValueError, match=r"^the text has <pad>, which fairseq takes for padding"):
        coder.encode("the <pad>")


@pytest.mark.parametrize(
    ("tokenizer", "bpe", "options", "message"),
    [
        (None, "subword_nmt", {}, "'subword_nmt' with bpe_codes None, which is not a file: give"),
        (None, "fastbpe", {"bpe_codes": "none"}, "'fastbpe' with bpe_codes none, which is not a"),
        ("moss", None, {}, "tokenizer is 'moss': there are moses, nltk, space"),
        # the libraries raise SystemExit or other errors for these
        (None, "subword_nmt", {"bpe_codes": __file__}, "'subword_nmt' and cannot be"),
        (None, "sentencepiece", {"sentencepiece_model": __file__}, "'sentencepiece' and cannot"),
    ],
)
def test_impossible_steps_are_refused(tokenizer, bpe, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build(tokenizer, bpe, options)
