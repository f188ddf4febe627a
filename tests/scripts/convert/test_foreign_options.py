"""Options and vocabularies that the importer reads, and what it says of others."""

import json
import re

import pytest
import torch

from fairseq_plugins.transformer_xl.model import PRESETS
from scripts._shared.commands import ROOT
from scripts.convert._foreign import ForeignConfig, ForeignVocabulary
from scripts.convert._models import AdaptiveSpanImport, TensorFlowImport, TransformerXLImport
from tests.scripts.convert.foreign_models import (
    CUTOFFS,
    SYMBOLS,
    TENSORFLOW,
    adaptive_span,
    transformer_xl,
    transformer_xl_tensorflow,
)


def config_of(tmp_path, options, problems):
    path = tmp_path / "config.json"
    path.write_text(options if isinstance(options, str) else json.dumps(options), encoding="utf-8")
    return ForeignConfig(path, problems)


def test_options_are_read_from_groups_too(tmp_path):
    problems = []
    options = {"a": 0, "group": {"b": 0.5, "c": True}, "d": [], "e": [3, 5], "f": [True, False]}
    config = config_of(tmp_path, options, problems)
    assert (config.integer("a", least=0), config.integer("none", default=7)) == (0, 7)
    assert (config.rate("b"), config.rate("a"), config.rate("none")) == (0.5, 0, 0.0)
    assert (config.flag("c"), config.flag("none", False)) == (True, False)
    assert (config.numbers("d"), config.numbers("e")) == ([], [3, 5])
    assert config.flags("f", 2) == [True, False]
    config.expect("a", 0, "")
    config.expect("none", 3, "")
    assert not problems
    assert config.readable


@pytest.mark.parametrize(
    ("options", "read", "message"),
    [
        ({}, lambda c: c.integer("x"), "LABEL lacks x: a whole number of at least 1"),
        ({"x": None}, lambda c: c.flag("x", True), "LABEL lacks x: true or false"),
        *(
            (
                {"x": value},
                lambda c: c.integer("x", least=2),
                f"x is {json.dumps(value)} in LABEL: it must be a whole number of at least 2",
            )
            for value in (1, 2.0, True, "3")
        ),
        *(
            (
                {"x": value},
                lambda c: c.rate("x"),
                f"x is {json.dumps(value)} in LABEL: it must be a number in [0, 1)",
            )
            for value in (1, -0.1, True, "0", float("nan"))
        ),
        ({"x": 1}, lambda c: c.flag("x"), "x is 1 in LABEL: it must be true or false"),
        *(
            (
                {"x": value},
                lambda c: c.numbers("x"),
                f"x is {json.dumps(value)} in LABEL: it must be a list of rising numbers",
            )
            for value in ([2, 1], [1, 1], [0, 1], [1.0], [True], 3)
        ),
        *(
            (
                {"x": value},
                lambda c: c.flags("x", 2),
                f"x is {json.dumps(value)} in LABEL: it must be a list of 2 times true or false",
            )
            for value in ([True], [True, 0], True)
        ),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, read, message):
    problems = []
    config = config_of(tmp_path, options, problems)
    assert read(config) is None
    assert problems == [message.replace("LABEL", f"--config {tmp_path}/config.json")]
    assert not config.readable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: "),
        ("", "is not JSON: "),
        ("[1]", "has no options: it must be an object of JSON"),
    ],
)
def test_a_file_without_options_is_refused(tmp_path, content, message):
    label = re.escape(f"--config {tmp_path}/config.json")
    with pytest.raises(ValueError, match=f"^{label} {message}"):
        config_of(tmp_path, content, [])
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=f"^{label} is not JSON: "):
        ForeignConfig(tmp_path / "config.json", [])
    with pytest.raises(ValueError, match=f"^--config {tmp_path} is no file: name the model's opt"):
        ForeignConfig(tmp_path, [])


def vocabulary_of(tmp_path, symbols, problems):
    path = tmp_path / "vocab.txt"
    path.write_text("".join(f"{symbol}\n" for symbol in symbols), encoding="utf-8")
    return ForeignVocabulary(path, problems)


@pytest.mark.parametrize(
    ("symbols", "messages"),
    [
        (["<eos>", "", "a"], ["LABEL, line 2: '' is empty or has spaces"]),
        (["<eos>", "a b"], ["LABEL, line 2: 'a b' is empty or has spaces"]),
        (["<eos>", "a\u00a0"], ["LABEL, line 2: 'a\\xa0' is empty or has spaces"]),
        (["<eos>", "a", "a", "a"], [f"LABEL, line {n}: 'a' occurs twice" for n in (3, 4)]),
        *(
            (["<eos>", special], [f"LABEL, line 2: {special!r} is a special symbol of fairseq's"])
            for special in ("<s>", "<pad>", "</s>")
        ),
        ([], ["LABEL, line 1: '' is empty or has spaces"]),
    ],
)
def test_wrong_vocabularies_are_refused(tmp_path, symbols, messages):
    problems = []
    vocabulary_of(tmp_path, symbols, problems)
    label = f"--vocab {tmp_path}/vocab.txt"
    assert problems == [message.replace("LABEL", label) for message in messages]


def test_a_file_without_a_vocabulary_is_refused(tmp_path):
    with pytest.raises(ValueError, match=f"^--vocab {tmp_path} is no file: name the model's symb"):
        ForeignVocabulary(tmp_path, [])
    path = tmp_path / "vocab.txt"
    path.write_bytes(b"<eos>\na\xff\n")
    with pytest.raises(ValueError, match=f"^--vocab {path} is not UTF-8: "):
        ForeignVocabulary(path, [])


@pytest.mark.parametrize("symbols", [["a", "<unk>", "b", "<eos>", "c"], ["a", "<eos>", "b"]])
def test_rows_follow_the_dictionary(tmp_path, symbols):
    vocabulary = vocabulary_of(tmp_path, symbols, [])
    rows = torch.arange(1.0, len(symbols) + 1)
    found = vocabulary.arrange(rows, missing=-7.0)
    assert len(found) == len(vocabulary.dictionary) == len(symbols) + vocabulary.added
    for symbol, value in zip(vocabulary.dictionary.symbols, found.tolist(), strict=True):
        name = "<eos>" if symbol == "</s>" else symbol
        assert value == (symbols.index(name) + 1 if name in symbols else -7.0)
    # the first band alone
    assert vocabulary.fits_first_band(4)
    assert not vocabulary.fits_first_band(1)
    band = vocabulary.arrange(rows[:-1].unsqueeze(1).expand(-1, 3))
    assert band[:, 0].tolist() == [max(value, 0.0) for value in found[:-1].tolist()]


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("characters", "enwik8_large"),
        ("characters", "text8_large"),
        ("wt103", "wt103_large"),
        ("lm1b", "lm1b_large"),
    ],
)
def test_options_of_the_published_tensorflow_models_are_the_presets(name, preset):
    folder = ROOT / "examples" / "segment_language_model"
    config = json.loads((folder / f"tensorflow_{name}.json").read_text(encoding="utf-8"))
    preset = PRESETS[f"transformer_xl_{preset}"]
    assert (config["n_layer"], config["n_head"]) == (
        preset["decoder_layers"],
        preset["decoder_attention_heads"],
    )
    assert (config["d_model"], config["d_inner"]) == (
        preset["decoder_embed_dim"],
        preset["decoder_ffn_embed_dim"],
    )
    assert ",".join(map(str, config["cutoffs"])) == preset.get("adaptive_input_cutoff", "")
    assert config.get("div_val") == preset.get("adaptive_input_factor")
    dropouts = preset["dropout"], preset["attention_dropout"]
    assert (config["dropout"], config["dropatt"]) == dropouts


def problems_of(tmp_path, foreign, symbols=SYMBOLS, **changed):
    """What the importer says of a model's options, without --config and its path."""
    problems = []
    config = config_of(tmp_path, {**foreign.config, **changed}, problems)
    vocabulary = vocabulary_of(tmp_path, symbols, problems)
    if foreign.source == "adaptive-span":
        AdaptiveSpanImport(config, vocabulary)
    elif foreign.source == TENSORFLOW:
        TensorFlowImport(config, vocabulary)
    else:
        TransformerXLImport(config, vocabulary, foreign.source != "transformer-xl")
    label = f"--config {tmp_path}/config.json"
    return [problem.replace(f" in {label}", "").replace(f"{label}: ", "") for problem in problems]


LATE = [*SYMBOLS[5:], *SYMBOLS[:5]]
TOO_FEW = "<eos> and <unk> must be among the first 9 symbols"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_token": 31}, "it has 31 symbols, and the vocabulary has 30"),
        ({"n_head": 3}, "d_model is 16: n_head, 3, must divide it"),
        ({"d_head": 9}, "d_head is 9: here d_head is d_model / n_head"),
        ({"d_embed": 8}, "d_embed is 8: here d_embed is d_model"),
        *(
            (
                {"attn_type": n},
                f"attn_type is {n}: only 0, Transformer-XL's own attention, is known",
            )
            for n in (1, 2, 3)
        ),
        ({"ext_len": 4}, "ext_len is 4: import it with 0, and evaluate with --extended-context"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06: only 1e-05 is known"),
        (
            {"same_length": True, "mem_len": 0},
            "same_length with mem_len 0 leaves nothing to attend to",
        ),
        ({"cutoffs": [9, 16, 30]}, "cutoffs end at 30, beyond the vocabulary"),
        (
            {"tie_projs": [True] * 3},
            "tie_projs is [true, true, true]: it must be a list of 4 times",
        ),
        ({"symbols": LATE}, TOO_FEW),
    ],
)
def test_options_of_another_transformer_xl_are_refused(tmp_path, changed, message):
    (found,) = problems_of(tmp_path, transformer_xl(CUTOFFS, 2), **changed)
    assert found.startswith(message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n_token": 31}, "it has 31 symbols, and the vocabulary has 30"),
        ({"d_embed": 8}, "d_embed is 8: here d_embed is d_model"),
        ({"cutoffs": []}, "div_val is 2: without cutoffs there is one band, as wide as the model"),
        ({"cutoffs": [9, 16, 30]}, "cutoffs end at 30, beyond the vocabulary"),
        ({"proj_same_dim": 1}, "proj_same_dim is 1: it must be true or false"),
        ({"same_length": None}, "--config lacks same_length: true or false"),
        ({"symbols": LATE}, TOO_FEW),
    ],
)
def test_options_of_another_tensorflow_model_are_refused(tmp_path, changed, message):
    found = problems_of(tmp_path, transformer_xl_tensorflow(CUTOFFS, 2), **changed)
    assert [problem.replace(f"{tmp_path}/config.json ", "") for problem in found] == [message]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"nb_heads": 3}, "hidden_size is 16: nb_heads, 3, must divide it"),
        ({"vocab_size": 31}, "it has 31 symbols, and the vocabulary has 30"),
        (
            {"adapt_io_params": {"adapt_io_enabled": True, "adapt_io_cutoffs": []}},
            "adapt_io_enabled is true and adapt_io_cutoffs are empty",
        ),
        (
            {"adapt_io_params": {"adapt_io_enabled": True, "adapt_io_cutoffs": [9, 30]}},
            "adapt_io_cutoffs end at 30, beyond the vocabulary",
        ),
        ({"symbols": LATE}, TOO_FEW),
    ],
)
def test_options_of_another_adaptive_span_are_refused(tmp_path, changed, message):
    assert problems_of(tmp_path, adaptive_span(cutoffs=CUTOFFS), **changed) == [message]


def test_options_of_the_layouts_are_fine(tmp_path):
    foreign = transformer_xl(CUTOFFS, 2, hugging_face=True)
    assert problems_of(tmp_path, foreign) == []
    assert problems_of(tmp_path, foreign, vocab_size=31) == [
        "it has 31 symbols, and the vocabulary has 30"
    ]
    assert problems_of(tmp_path, adaptive_span(0)) == []
    # what follows from the vocabulary, and the code's own defaults, may be missing
    foreign = transformer_xl_tensorflow(CUTOFFS, 2)
    assert problems_of(tmp_path, foreign) == []
    for name in ("untie_r", "div_val", "proj_share_all_but_first", "proj_same_dim", "d_embed"):
        del foreign.config[name]
    assert problems_of(tmp_path, foreign) == []


def test_symbols_that_a_vocabulary_lacks_are_told(tmp_path):
    for symbols, lacks in ((["a", "<unk>"], ["<eos>"]), (["a"], ["<eos>", "<unk>"])):
        problems = []
        vocabulary = vocabulary_of(tmp_path, symbols, problems)
        assert not problems
        assert vocabulary.lacks == lacks
        assert vocabulary.added == 2 + len(lacks)


def test_groups_within_groups_are_no_options(tmp_path):
    problems, options = [], {"settings": {"t7": {"mem_len": 3}}, "exact": {"t7": 30}, "mem_len": 10}
    assert config_of(tmp_path, options, problems).integer("mem_len") == 10
    assert not problems


def test_an_option_twice_with_different_values_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"mem_len": 10, "same": 1, "group": {"mem_len": 3, "same": 1}, "left": 0}')
    problems = []
    config = ForeignConfig(path, problems)
    assert problems == [f"--config {path}: mem_len occurs twice, with different values"]
    config.integer("mem_len")
    config.expect("same", 1, "")
    assert config.unread() == ["left"]
    assert (config.name_of("new", "left"), config.name_of("new", "old")) == ("left", "new")
