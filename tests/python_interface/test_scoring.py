"""Losses of a whole split: each token is scored once, in order, given the tokens before it."""

import re

import numpy as np
import pytest
import torch

from fairseq_plugins import load
from fairseq_plugins.python_interface import scoring
from tests import tiny
from tests.scripts.evaluate.saved_memory_models import TARGETS, TOKENS, sentence
from tests.scripts.evaluate.saved_models import token_losses, write_checkpoint, write_text

EOS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write a text; models that read all of it, of segments alone, and with adaptive softmax."""
    folder = tmp_path_factory.mktemp("scoring")
    write_text(folder / "bin")
    bands = {"adaptive_softmax_cutoff": "8,14", "adaptive_softmax_factor": 2}
    for name, options in {
        "all": {"mem_len": 200},
        "absolute": {"positions": "sinusoidal-absolute", "mem_len": 0},
        "adaptive": {"mem_len": 200, **bands},
    }.items():
        write_checkpoint(folder / f"{name}.pt", "transformer_xl", **options)
    return folder


@pytest.fixture(scope="module")
def text(folder):
    return np.fromfile(folder / "bin" / "test.bin", dtype=np.uint16)


@pytest.mark.parametrize(
    ("name", "segment", "context", "streams"),
    [
        *(("all", segment, 0, 1) for segment in (1, 64, 1000)),
        ("all", 7, 0, 2),
        ("all", 100, 0, 7),
        ("adaptive", 5, 0, 1),
        ("absolute", 1, 4, 6),
        ("absolute", 5, 3, 2),
    ],
)
def test_score_split_scores_each_token_once(
    folder, text, monkeypatch, name, segment, context, streams
):
    """After the tokens of its stream, or of its segment and the context before it."""
    # compute log-probabilities for 7 tokens at once
    monkeypatch.setattr(scoring, "LOG_PROBABILITIES", 7 * tiny.VOCABULARY)
    model, expected = load(folder / f"{name}.pt", folder / "bin"), []
    parts = np.array_split(np.arange(len(text)), streams)
    before = np.concatenate([[EOS], text])
    for position in range(len(text)):
        begin = next(part[0] for part in parts if position in part)
        if name == "absolute":
            begin = max(0, position - (position - begin) % segment - context)
        seen = slice(begin, position + 1)
        expected.append(token_losses(model.model, before[seen], text[seen])[-1])
    options = {"tokens_per_sample": segment, "extended_context": context, "batch_size": streams}
    losses = model.score_split(**options)
    assert losses.dtype == np.float32
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    if streams == 1:
        np.testing.assert_allclose(
            model.score_split(**options, max_tokens=11), losses[:11], atol=1e-5
        )


def test_score_split_scores_all_pairs_in_order(saved, monkeypatch):
    model = load(saved / "pairs.pt", saved / "pairs")
    losses = model.score_split(batch_size=3)
    texts = [
        [coder.decode(sentence(number, side)[0, :-1]) for number in range(7)]
        for side, coder in enumerate((model.source, model.target))
    ]
    expected = np.concatenate([-score.log_probs for score in model.score(*texts)])
    assert len(losses) == TARGETS
    np.testing.assert_allclose(losses, expected, atol=1e-5)
    # some sentences are too long
    monkeypatch.setattr(type(model.model), "max_positions", lambda model: (8, 8))
    with pytest.raises(ValueError, match=f"{TARGETS - 3} tokens were scored of the {TARGETS} of"):
        model.score_split()


def test_score_split_notices_unknown_tokens_and_infinite_losses(saved, tmp_path, caplog):
    model = load(saved / "blocks.pt", saved / "text")
    unknown = model.text.dictionary.unk()
    tokens = np.fromfile(saved / "text" / "test.bin", dtype=np.uint16)
    assert (len(tokens), (tokens == unknown).sum()) == (TOKENS, 0)
    model.score_split()
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    for name in ("dict.txt", "test.idx"):
        (tmp_path / name).write_bytes((saved / "text" / name).read_bytes())
    tokens[5] = unknown
    tokens.tofile(tmp_path / "test.bin")
    model = load(saved / "blocks.pt", tmp_path)
    model.score_split()
    assert re.search(r"1\.0 % of 97 tokens are <unk>", caplog.text)
    with torch.no_grad():
        # the bias is finite, but its square is not
        model.model.decoder.layers[2].fc2.bias[0] = 3e38
    with pytest.raises(FloatingPointError, match="the loss of a token is not finite"):
        model.score_split()


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("recurrent", {"split": "dev"}, "split dev: no data at .*dev.bin"),
        ("recurrent", {"batch_size": 98}, "batch_size is 98.*97 tokens"),
        ("blocks", {"extended_context": 7}, "tokens_per_sample is 10.*extended_context 7"),
        ("pairs", {"split": "dev"}, "split dev: Dataset not found: dev .*: name a split"),
    ],
)
def test_score_split_refuses_impossible_arguments(models, kind, options, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        models(kind).score_split(**options)
