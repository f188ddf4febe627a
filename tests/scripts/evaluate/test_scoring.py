import re

import numpy as np
import pytest
import torch

from fairseq_plugins.python_interface import scoring
from scripts.evaluate import _scoring as score_text
from tests import tiny
from tests.scripts.evaluate.saved_models import token_losses, write_checkpoint, write_text

CPU = torch.device("cpu")
EOS = 2


@pytest.fixture(scope="module")
def text(folder):
    return write_text(folder / "bin")


@pytest.fixture(scope="module")
def model(folder):
    """Attends to all of the text."""
    return write_checkpoint(folder / "xl.pt", "transformer_xl", mem_len=200)


def before(text, first=0):
    """The token before each of ``text``, which starts after ``first`` others."""
    return np.concatenate([[EOS], text])[first : len(text)]


@pytest.mark.parametrize("segment", [1, 5, 64, 1000])
def test_one_stream_gives_the_losses_of_the_whole_text_in_order(folder, text, model, segment):
    task = score_text.load_task(folder / "bin", segment)
    losses = score_text.score_text(model, task, score_text.load_tokens(task, "test"), 1)
    assert losses.dtype == np.float32
    np.testing.assert_allclose(losses, token_losses(model, before(text), text), atol=1e-5)


@pytest.mark.parametrize(("streams", "segment"), [(2, 7), (5, 8), (7, 100)])
def test_each_stream_has_a_memory_of_its_own(folder, text, model, streams, segment):
    task = score_text.load_task(folder / "bin", segment)
    losses = score_text.score_text(model, task, text, streams)
    parts = np.array_split(text, streams)
    first, expected = 0, []
    for part in parts:
        inputs = before(text)[first : first + len(part)]
        expected.append(token_losses(model, inputs, part))
        first += len(part)
    np.testing.assert_allclose(losses, np.concatenate(expected), atol=1e-5)


@pytest.mark.parametrize(("segment", "context", "streams"), [(1, 4, 6), (5, 3, 2), (8, 0, 1)])
def test_an_extended_context_is_read_and_not_scored(folder, text, segment, context, streams):
    model = tiny.tiny_transformer_xl(positions="sinusoidal-absolute", mem_len=0).eval()
    task = score_text.load_task(folder / "bin", segment, context)
    losses = score_text.score_text(model, task, text, streams)
    bounds = np.cumsum([0, *(len(part) for part in np.array_split(text, streams))])
    expected = []
    for position in range(len(text)):
        stream = np.searchsorted(bounds, position, side="right") - 1
        begin = position - (position - bounds[stream]) % segment
        first = max(0, begin - context)
        inputs = before(text)[first : position + 1]
        expected.append(token_losses(model, inputs, text[first : position + 1])[-1])
    np.testing.assert_allclose(losses, expected, atol=1e-5)


def test_pieces_of_the_probabilities_change_nothing(folder, text, monkeypatch):
    bands = {"adaptive_softmax_cutoff": "8,14", "adaptive_softmax_factor": 2}
    model = tiny.tiny_transformer_xl(**bands, mem_len=200).eval()
    task = score_text.load_task(folder / "bin", 30)
    whole = score_text.score_text(model, task, text, 2)
    np.testing.assert_allclose(
        score_text.score_text(model, task, text, 1),
        token_losses(model, before(text), text),
        atol=1e-5,
    )
    monkeypatch.setattr(scoring, "_LOG_PROBABILITIES", 7 * tiny.VOCABULARY)
    np.testing.assert_allclose(score_text.score_text(model, task, text, 2), whole, atol=1e-6)


def test_a_loaded_model_scores_as_the_saved_one(folder, text, model):
    task = score_text.load_task(folder / "bin", 16)
    loaded = score_text.load_language_model(folder / "xl.pt", task, {}, CPU)
    expected = score_text.score_text(model, task, text, 1)
    np.testing.assert_array_equal(score_text.score_text(loaded, task, text, 1), expected)


def test_options_are_overridden(folder, text, model):
    task = score_text.load_task(folder / "bin", 16)
    overrides = {"mem_len": 3, "same_length": True, "clamp_len": 2}
    loaded = score_text.load_language_model(folder / "xl.pt", task, overrides, CPU)
    assert loaded.decoder.context.mem_len == 3
    assert loaded.decoder.layers[0].self_attn.window == (0, 2)
    assert loaded.decoder.positions.clamp_len == 2
    assert not loaded.training


def test_an_unknown_option_is_not_overridden(folder, text, model):
    task = score_text.load_task(folder / "bin", 16)
    message = "its model transformer_xl has no option attention_span to override: leave it out"
    with pytest.raises(ValueError, match=re.escape(message)):
        score_text.load_language_model(folder / "xl.pt", task, {"attention_span": 3}, CPU)


def test_only_the_first_tokens_are_loaded(folder, text):
    task = score_text.load_task(folder / "bin", 16)
    np.testing.assert_array_equal(score_text.load_tokens(task, "test", 11), text[:11])
    np.testing.assert_array_equal(score_text.load_tokens(task, "test"), text)


def test_text_that_is_not_there_is_refused(folder, text):
    task = score_text.load_task(folder / "bin", 16)
    with pytest.raises(ValueError, match=r"--split dev: no data at .*dev.bin: name the folder"):
        score_text.load_tokens(task, "dev")
    with pytest.raises(ValueError, match="--max-tokens is 0: it must be at least 1"):
        score_text.load_tokens(task, "test", 0)


def test_a_batch_that_is_left_out_is_noticed(folder, text, model, monkeypatch):
    task = score_text.load_task(folder / "bin", 10)
    whole = type(task).get_batch_iterator

    def cut(*args, **options):
        return whole(*args, **options, skip_remainder_batch=True)

    monkeypatch.setattr(type(task), "get_batch_iterator", cut)
    message = "90 tokens were scored and 7 left out of the 97 of the text, so the figure would be"
    with pytest.raises(ValueError, match=message):
        score_text.score_text(model, task, text, 1)


def test_a_memory_beside_an_extended_context_is_refused(folder, text, model):
    task = score_text.load_task(folder / "bin", 10, 5)
    message = "the extended context is 5 tokens for a model with a recurrence of 200, which would"
    with pytest.raises(ValueError, match=message):
        score_text.score_text(model, task, text, 1)


@pytest.mark.parametrize(
    ("positions", "longest"),
    [("transformer-xl", None), ("learned-absolute", 12), ("sinusoidal-absolute", 12)],
)
def test_positions_limit_the_segment(positions, longest):
    options = {"positions": positions, "tokens_per_sample": 8, "extended_context": 4}
    assert score_text.max_segment(options) == longest
    assert score_text.max_segment({"attention_span": 6}) is None


def test_the_cpu_can_be_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert score_text.choose_device(cpu=True) == CPU
    assert score_text.choose_device(cpu=False) == torch.device("cuda")
