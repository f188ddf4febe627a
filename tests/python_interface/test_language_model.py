"""Scores, streams and continuations of language models, in one process."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from fairseq_plugins import load
from fairseq_plugins.python_interface.scoring import in_unit

TEXT = "abcdefghijklmnop\nponmlkj\n\nabacadaeafagahaiajak\nacegikmo"
KINDS = ("recurrent", "same_length", "zeros", "forgetful", "absolute", "spans", "streams", "blocks")
# cuts within segments of 8 and blocks of 10, at their ends, and after each token
CUTS = [(3,), (8, 16), (1, 2, 3, 20, 21, 40), tuple(range(1, len(TEXT)))]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_in_pieces_and_in_batches_have_the_scores_of_the_whole(models, kind):
    model = models(kind)
    whole = model.score(TEXT)
    for cuts in CUTS:
        stream, bounds = model.stream(), (0, *cuts, len(TEXT))
        first, *others = (stream.score(TEXT[begin:end]) for begin, end in pairwise(bounds))
        score = sum(others, first)
        assert score.tokens == whole.tokens
        np.testing.assert_allclose(score.log_probs, whole.log_probs, atol=2e-5)
        assert score.loss == pytest.approx(whole.loss, abs=1e-5)
        assert len(stream) == len(TEXT)
    texts = [TEXT[:5], TEXT, "\n", TEXT[7:40], "p"]
    for batch_size in (1, 2, 16):
        for found, text in zip(model.score(texts, batch_size), texts, strict=True):
            alone = model.score(text)
            assert found.tokens == alone.tokens
            np.testing.assert_allclose(found.log_probs, alone.log_probs, atol=2e-5)


def test_streams_are_of_their_own(models):
    model = models("recurrent")
    one, other = model.stream(), model.stream()
    found = []
    for begin in range(0, 30, 10):
        found.append(one.score(TEXT[begin : begin + 10]).log_probs)
        other.score(TEXT[::-1][begin : begin + 10])
    expected = model.score(TEXT[:30]).log_probs
    np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-5)


def test_a_score_has_its_tokens_and_the_usual_figure(models):
    score = models("recurrent").score("ab\nc")
    assert score.tokens == ["a", "b", "</s>", "c"]
    assert (score.log_probs.dtype, score.log_probs.shape) == (np.float32, (4,))
    assert score.nats == pytest.approx(-score.log_probs.mean())
    assert str(score) == f"{score.nats / np.log(2):.4f} bits per character, 4 tokens"
    assert in_unit(np.log(8), "perplexity") == pytest.approx(8)


def test_segments_and_options_are_those_asked_for(saved, models):
    found = load(saved / "recurrent.pt", saved / "text", tokens_per_sample=3, mem_len=100)
    assert found.segment == 3
    covering = load(saved / "recurrent.pt", saved / "text", tokens_per_sample=100, mem_len=100)
    np.testing.assert_allclose(
        found.score(TEXT).log_probs, covering.score(TEXT).log_probs, atol=2e-5
    )
    assert np.abs(models("recurrent").score(TEXT).log_probs - found.score(TEXT).log_probs).max() > 0
    longer = load(saved / "absolute.pt", saved / "text", extended_context=2)
    assert (longer.segment, longer.context) == (8, 2)


@pytest.mark.parametrize("kind", ["recurrent", "blocks"])
def test_a_prompt_is_continued_by_what_is_likeliest(saved, kind):
    # generation treats each token as a segment
    length = 1 if kind == "recurrent" else None
    model = load(saved / f"{kind}.pt", saved / "text", tokens_per_sample=length)
    text = model.generate("abc", 4)
    for end in range(3, 7):
        scores = {
            letter: model.score(text[:end] + letter).log_probs[-1] for letter in "abcdefghijklmnop"
        }
        assert text[end] in ("<", max(scores, key=scores.get))
    (found,) = model.hypotheses("abc", 4)
    assert found.text == text
    expected = model.score(text).log_probs
    np.testing.assert_allclose(found.log_probs[:7], expected, atol=2e-5)


def test_samples_are_those_of_their_seed_and_temperature(saved, models):
    model = models("recurrent")
    state = torch.get_rng_state()
    first, again, other = (model.generate("ab", 30, top_k=5, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)
    assert model.generate("ab", 30, sampling=True) != model.generate("ab", 30, sampling=True)
    # there is only one choice
    likeliest = model.generate("ab", 30)
    assert model.generate("ab", 30, top_k=1) == likeliest
    assert model.generate("ab", 30, top_p=1e-6) == likeliest
    assert model.generate("ab", 30, sampling=True, temperature=1e-3) == likeliest
    # the symbols forced by the prompt are then too unlikely for single precision
    blocks = models("blocks")
    assert blocks.generate("ab", 6, sampling=True, temperature=1e-6) == blocks.generate("ab", 6)
    # the temperatures of scores and of generation multiply
    model = load(saved / "recurrent.pt", saved / "text", softmax_temperature=2.0)
    found = model.generate("ab", 30, sampling=True, temperature=1.5, seed=1)
    assert found == models("recurrent").generate("ab", 30, sampling=True, temperature=3.0, seed=1)
    assert model.score(TEXT).nats != pytest.approx(models("recurrent").score(TEXT).nats, abs=1e-3)


def test_generation_stops_where_the_line_does_if_asked_to(saved, models, tmp_path):
    model = models("recurrent")
    samples = [model.generate("ab", 40, sampling=True, seed=seed) for seed in range(4)]
    assert any("\n" in sample for sample in samples)
    given = {"sampling": True, "stop_at_newline": True}
    lines = [model.generate("ab", 40, seed=seed, **given) for seed in range(4)]
    assert not any("\n" in line for line in lines)
    assert min(map(len, lines)) < 42
    # even if the model was trained with --continue-past-eos
    state = torch.load(saved / "recurrent.pt", weights_only=False)
    state["cfg"]["task"]["continue_past_eos"] = True
    torch.save(state, tmp_path / "endless.pt")
    endless = load(tmp_path / "endless.pt", saved / "text")
    assert [endless.generate("ab", 40, seed=seed, **given) for seed in range(4)] == lines
    # prompts of a list are continued one by one
    assert model.generate(["", "a", "\n"], 5) == [model.generate(p, 5) for p in ("", "a", "\n")]


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("kind", ["recurrent", "blocks"])
def test_the_beginning_of_sentences_is_a_symbol_of_text(saved, kind, beam):
    model = load(saved / f"{kind}.pt", saved / "text", unit="words")
    bos = model.text.dictionary.bos()
    normalize = model.model.get_normalized_probs

    def likely(*args, **options):
        probs = normalize(*args, **options)
        probs[..., bos] = -0.1
        return probs

    model.model.get_normalized_probs = likely
    score = model.score("<s> a b\n<s> c")
    assert score.tokens == ["<s>", "a", "b", "</s>", "<s>", "c"]
    assert score.log_probs[[0, 4]] == pytest.approx(-0.1)
    found = model.hypotheses("<s> a", 4, beam=beam)
    assert len(found) == beam
    assert found[0].tokens == ["<s>", "a", *["<s>"] * 4]
    assert found[0].log_probs[2:] == pytest.approx([-0.1] * 4 + [0])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"sampling": True, "seed": 1}])
@pytest.mark.parametrize("kind", ["recurrent", "blocks"])
def test_no_sequence_is_repeated(models, kind, size, options):
    model = models(kind)
    # as many tokens as blocks have positions for
    (found, *_) = model.hypotheses("a", 14, no_repeat_ngram_size=size, **options)
    assert len(found.tokens) == 15
    # generation starts after </s>
    tokens = ["</s>", *found.tokens]
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    assert len(set(grams)) == len(grams)
    # a prompt stays as it is
    assert model.generate("abab", 3, no_repeat_ngram_size=size).startswith("abab")


def test_it_warns_about_unknown_symbols_and_moves_to_a_device(saved, caplog):
    model = load(saved / "recurrent.pt", saved / "text", allow_unknown=True)
    model.score("a" * 99 + "x")
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    model.score("a" * 97 + "xyz")
    assert "3.0 % of 100 tokens are <unk>" in caplog.text
    assert model.to("cpu") is model
    assert model.device == torch.device("cpu")
    expected = model.score(TEXT).log_probs
    found = model.to(torch.float64).score(TEXT).log_probs
    np.testing.assert_allclose(found, expected, atol=1e-5)
