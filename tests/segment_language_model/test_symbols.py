"""Whether tokens are characters, on which bits per character depend."""

import pytest
from fairseq.data import Dictionary

from fairseq_plugins.segment_language_model.generation import is_characters


@pytest.mark.parametrize(
    ("symbols", "characters"),
    [
        (["a", "▁", "ü", "0"], True),
        (["32", "116", "0", "255"], True),
        (["32", "116", "256"], False),
        (["a", "32"], False),
        (["a", "the"], False),
        # with which fairseq-preprocess fills a dictionary up
        (["a", "▁", "madeupword0000", "madeupword0001"], True),
    ],
)
def test_characters_and_bytes_are_told_from_words(symbols, characters):
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol)
    assert is_characters(dictionary) is characters
