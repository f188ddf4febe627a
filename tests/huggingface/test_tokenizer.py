"""A tokenizer gives a text the indices that a loaded model gives it."""

import json

import pytest

from fairseq_plugins.python_interface.text import TextCoder, build_lines
from fairseq_plugins.units import read_units
from scripts.prepare import __main__ as preparation

LINES = ["Ein  Test: x_1, y-2!", "", "\tdef f(x):", "    return x\u00a0+ 1  ", "a\u2581b"]
# the unit GH@@ is a step to others, and no text has it; the symbols G@@ and H@@ in a row make it
LINES += ["GHK GHL GHK GHL Gx Hy"]


@pytest.mark.parametrize(
    "words",
    [
        "words",
        "words --split-punctuation",
        "words --moses de",
        "characters",
        "subwords --bpe-size 20",
        "sentencepiece --pieces 310",
    ],
)
def test_a_text_gets_the_indices_that_load_gives_it(words, tmp_path):
    pytest.importorskip("transformers", reason="pip install '.[huggingface]'")
    from fairseq.data import Dictionary

    from fairseq_plugins.huggingface import SUBWORDS, DictionaryTokenizer
    from scripts.convert.huggingface import check_tokenizer, copy_data

    (tmp_path / "text.txt").write_text("\n".join(LINES * 8) + "\n", encoding="utf-8")
    unit, *options = words.split()
    line = [
        "text",
        "--input",
        str(tmp_path / "text.txt"),
        "--unit",
        unit,
        *options,
        "--workers",
        "1",
    ]
    assert preparation.main([*line, "--output", str(tmp_path / "data")]) == 0
    folder, target = tmp_path / "data/bin", tmp_path / "target"
    target.mkdir()
    units, dictionary = read_units(folder), Dictionary.load(str(folder / "dict.txt"))
    copy_data(folder, target)
    tokenizer = DictionaryTokenizer.from_pretrained(target)
    options = {"source_lang": units.language, "moses_no_dash_splits": units.moses_no_dash_splits}
    options |= {"bpe_codes": str(units.model), "sentencepiece_model": str(units.model)}
    (lines,) = build_lines(units.tokenizer, units.bpe, options, units, [dictionary])
    check_tokenizer(tokenizer, TextCoder(dictionary, lines))
    coder = TextCoder(dictionary, lines, allow_unknown=True)
    text = "\n".join([*LINES, "xyz", "\u1234", "</s>"]) + "\r\n"
    expected = coder.encode(text)
    numbers = tokenizer(text)["input_ids"]
    assert numbers == [0, *expected.tolist()]
    decoded = tokenizer.decode([1, *numbers], skip_special_tokens=True)
    assert decoded == coder.decode(expected)
    assert json.loads((target / "units.json").read_text())["model"] in (None, SUBWORDS)
    assert len(tokenizer) == len(dictionary)
