"""Text becomes symbols and text again: characters, bytes, words, Moses and BPE."""

import io
import re

import pytest
import sentencepiece
from fairseq.data import Dictionary

from fairseq_plugins.python_interface.text import TextCoder, build_lines, step_options

WORDS = "the cat sat on a mat and the dogs ran home"


def dictionary(symbols):
    made = Dictionary()
    for symbol in symbols:
        made.add_symbol(symbol)
    return made


@pytest.fixture(scope="module")
def codes(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "codes"
    path.write_text("#version: 0.2\nt h\nth e</w>\na t</w>\n", encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("sentencepiece") / "model"
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([WORDS, "def f(x):", "    return x"] * 9),
        model_writer=made,
        vocab_size=60,
        model_type="bpe",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        hard_vocab_limit=False,
    )
    path.write_bytes(made.getvalue())
    return str(path)


@pytest.mark.parametrize(
    ("symbols", "text", "expected"),
    [
        ("ab▁", "a b\nb", "a ▁ b </s> b"),
        ("ab_", "a b\nb", "a _ b </s> b"),
        (["65", "32", "195", "164", "0"], "A ä\n\n", "65 32 195 164 </s> </s>"),
        (WORDS.split(), "the cat\nsat on\n", "the cat </s> sat on </s>"),
    ],
)
def test_the_dictionary_says_what_a_symbol_is(symbols, text, expected):
    coder = TextCoder(dictionary(symbols))
    tokens = coder.encode(text)
    assert coder.symbols(tokens) == expected.split()
    assert coder.decode(tokens) == text


def test_pieces_of_a_text_are_its_tokens():
    coder = TextCoder(dictionary("ab▁"))
    text = "a b\n\nb a\n"
    for cut in range(1, len(text)):
        parts = [coder.encode(part).tolist() for part in (text[:cut], text[cut:])]
        assert parts[0] + parts[1] == coder.encode(text).tolist()


def test_words_have_moses_tokens_and_units(codes):
    lines = build_lines("moses", "subword_nmt", {"bpe_codes": codes, "moses_no_escape": True})
    coder = TextCoder(dictionary(["the", "c@@", "at", "'@@", "s", "m@@", "!"]), lines)
    tokens = coder.encode("the cat's mat!")
    assert coder.symbols(tokens) == "the c@@ at '@@ s m@@ at !".split()
    assert coder.decode(tokens) == "the cat's mat!"


def test_sentencepiece_keeps_blanks_at_the_beginning_of_lines(pieces):
    lines = build_lines(None, "sentencepiece", {"sentencepiece_model": pieces})
    text = "def f(x):\n    return x"
    symbols = {symbol for line in text.split("\n") for symbol in lines.encode(line)}
    coder = TextCoder(dictionary([*sorted(symbols), "unused"]), lines)
    tokens = coder.encode(text)
    assert coder.symbols(tokens).count("</s>") == 1
    assert coder.decode(tokens) == text


def test_unknown_symbols_are_refused_or_counted_as_unk():
    coder = TextCoder(dictionary(WORDS.split()))
    message = "text 3 has symbols that the dictionary lacks ('bird', 'red'): write it in symbols"
    with pytest.raises(ValueError, match=re.escape(message)):
        coder.encode("the red bird sat on the red bird", "text 3")
    # which the prepared texts of words have
    assert coder.symbols(coder.encode("the <unk> sat")) == "the <unk> sat".split()
    coder = TextCoder(dictionary(WORDS.split()), allow_unknown=True)
    assert coder.symbols(coder.encode("the red bird")) == "the <unk> <unk>".split()
    with pytest.raises(ValueError, match=r"^the text has <pad>, which is no text to fairseq"):
        coder.encode("the <pad>")


@pytest.mark.parametrize(
    ("tokenizer", "bpe", "options", "message"),
    [
        (None, "subword_nmt", {}, "bpe is 'subword_nmt' without bpe_codes: give bpe_codes=FILE"),
        (None, "fastbpe", {"bpe_codes": "none"}, "bpe_codes is none, which is no file: name"),
        (None, "sentencepiece", {}, "bpe is 'sentencepiece' without sentencepiece_model: give"),
        ("moss", None, {}, "tokenizer is 'moss': there are moses, nltk, space"),
    ],
)
def test_steps_that_cannot_be_built_are_refused(tokenizer, bpe, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        build_lines(tokenizer, bpe, options)


def test_a_missing_library_is_named(monkeypatch, codes):
    monkeypatch.setitem(__import__("sys").modules, "sacremoses", None)
    message = "tokenizer is 'moses': Please install Moses tokenizer with: pip install sacremoses"
    with pytest.raises(ValueError, match=message):
        build_lines("moses", None, {})


def test_steps_have_options_of_their_own():
    assert step_options("bpe", "subword_nmt") == {"bpe_codes", "bpe_separator"}
    assert "source_lang" in step_options("tokenizer", "moses")
    assert step_options("bpe", None) == set()
