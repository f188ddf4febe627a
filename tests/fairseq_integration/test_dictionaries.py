"""A model's state has a digest of its dictionaries, and refuses others; the share of <unk>."""

import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset
from torch import nn

from fairseq_plugins.fairseq_integration.dictionaries import attach_digest, digest
from fairseq_plugins.segment_language_model.split import load_tokens
from tests.every_model import CASES

REFUSED = "another dictionary than the {} dictionary of DATA"


def dictionary(symbols="abcd"):
    made = Dictionary()
    for symbol in symbols:
        made.add_symbol(symbol)
    return made


def model(source="abcd", target="abcd"):
    """Return a linear layer that knows these dictionaries."""
    made = nn.Linear(2, 2)
    sides = {"source_dictionary": dictionary(source), "target_dictionary": dictionary(target)}
    attach_digest(made, SimpleNamespace(**sides))
    return made


@pytest.mark.parametrize(
    ("symbols", "side"), [({"source": "abdc"}, "source"), ({"target": "abce"}, "target")]
)
def test_digest_refuses_other_symbols_and_names_the_side(symbols, side):
    state = model().state_dict()
    model().load_state_dict(state)
    # it is checked before sizes
    state["weight"] = torch.ones(3, 2)
    with pytest.raises(ValueError, match=REFUSED.format(side)):
        model(**symbols).load_state_dict(state)


def test_digest_accepts_a_state_without_one():
    """A plain transformer's weights may start a Weighted Transformer."""
    model().load_state_dict(nn.Linear(2, 2).state_dict())


@pytest.mark.parametrize(
    "change",
    [lambda made: made.bfloat16(), lambda made: pickle.loads(pickle.dumps(made))],
    ids=["bfloat16", "pickle"],
)
def test_digest_survives_casts_and_copies(change):
    state = change(model()).state_dict()
    model().load_state_dict(state)
    with pytest.raises(ValueError, match=REFUSED.format("source")):
        change(model("dcba")).load_state_dict(state)


def test_digest_survives_an_average_of_many_checkpoints():
    """fairseq adds integers and divides the sum, rounding down."""
    states = [model().state_dict() for _ in range(50)]
    mean = {name: sum(state[name] for state in states) for name in states[0]}
    for name, total in mean.items():
        mean[name] = total / 50 if total.is_floating_point() else total // 50
    model().load_state_dict(mean)
    for name, value in mean.items():
        if "version" in name:
            assert torch.equal(value, states[0][name])


def test_digest_depends_on_symbols_and_order_alone():
    counted = dictionary()
    counted.add_symbol("a", n=7)
    assert torch.equal(digest(counted), digest(dictionary()))
    others = {
        tuple(digest(dictionary(symbols)).tolist()) for symbols in ("abcd", "abdc", "abc", "")
    }
    assert len(others) == 4
    assert all(0 <= number < 2**32 for number in digest(dictionary()).tolist())


def test_each_papers_models_have_a_digest():
    for build, _ in CASES.values():
        names = [name for name in build().state_dict() if name.startswith("dictionary_version.")]
        assert names == ["dictionary_version.source", "dictionary_version.target"]


@pytest.mark.parametrize(("unknown", "level"), [(2, logging.WARNING), (1, logging.INFO)])
def test_more_than_one_percent_unknown_is_a_warning(tmp_path, caplog, unknown, level):
    caplog.set_level(logging.INFO)
    letters = dictionary("a")
    text = [letters.unk()] * unknown + [letters.index("a")] * (100 - unknown)
    for name in ("train", "train1"):
        builder = indexed_dataset.make_builder(f"{tmp_path / name}.bin", "mmap", vocab_size=5)
        builder.add_item(torch.tensor(text))
        builder.finalize(f"{tmp_path / name}.idx")
    load_tokens(str(tmp_path / "train"), letters, "mmap", combine=True)
    share = f"{unknown}.0 % of 100 tokens are <unk>"
    records = [each for each in caplog.records if share in each.getMessage()]
    assert [each.levelno for each in records] == [level] * 2
    assert "/train1:" in records[1].getMessage()


@pytest.mark.parametrize(
    ("seen", "expected"),
    [(0, "50.0 % of 4 tokens are <unk>, and 0.00 % in training"), (1, "<unk> is easy to predict")],
)
def test_the_warning_about_unknown_symbols_depends_on_training(tmp_path, caplog, seen, expected):
    letters = dictionary("a")
    a, unknown = letters.index("a"), letters.unk()
    for name, text in {
        "train": [a] * (4 - seen) + [unknown] * seen,
        "test": [a, a, unknown, unknown],
    }.items():
        builder = indexed_dataset.make_builder(f"{tmp_path / name}.bin", "mmap", vocab_size=5)
        builder.add_item(torch.tensor(text))
        builder.finalize(f"{tmp_path / name}.idx")
    load_tokens(str(tmp_path / "test"), letters, "mmap")
    (warning,) = (each.getMessage() for each in caplog.records if each.levelno == logging.WARNING)
    assert expected in warning
