"""Scores, streams and continuations of language models, in one process."""

import copy
from concurrent.futures import ThreadPoolExecutor
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
def test_score_is_the_same_in_pieces_and_in_batches(models, kind):
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
        for score, text in zip(model.score(texts, batch_size), texts, strict=True):
            alone = model.score(text)
            assert score.tokens == alone.tokens
            np.testing.assert_allclose(score.log_probs, alone.log_probs, atol=2e-5)


@pytest.mark.parametrize("kind", ["recurrent", "spans", "absolute", "blocks"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copied_stream_goes_on_by_itself(models, kind, how):
    model, length, rests = models(kind), 13, ("abc\npaaaaa", "kkkkkkkkkk")
    stream = model.stream()
    stream.score(TEXT[:length])
    both, log_probs = (stream, how(stream)), ([], [])
    # letter by letter, in turns
    for letters in zip(*rests, strict=True):
        for one, letter, read in zip(both, letters, log_probs, strict=True):
            read += one.score(letter).log_probs.tolist()
    for one, rest, read in zip(both, rests, log_probs, strict=True):
        expected = model.score(TEXT[:length] + rest).log_probs[length:]
        np.testing.assert_allclose(read, expected, atol=2e-5)
        assert len(one) == length + len(rest)


def test_score_has_its_tokens_and_the_usual_figure(models):
    score = models("recurrent").score("ab\nc")
    assert score.tokens == ["a", "b", "</s>", "c"]
    assert (score.log_probs.dtype, score.log_probs.shape) == (np.float32, (4,))
    assert score.nats == pytest.approx(-score.log_probs.mean())
    assert str(score) == f"{score.nats / np.log(2):.4f} bits per character, 4 tokens"
    assert in_unit(np.log(8), "perplexity") == pytest.approx(8)


def test_load_takes_segments_and_options(saved, models):
    short = load(saved / "recurrent.pt", saved / "text", tokens_per_sample=3, mem_len=100)
    assert short.segment == 3
    covering = load(saved / "recurrent.pt", saved / "text", tokens_per_sample=100, mem_len=100)
    log_probs = short.score(TEXT).log_probs
    np.testing.assert_allclose(log_probs, covering.score(TEXT).log_probs, atol=2e-5)
    assert np.abs(models("recurrent").score(TEXT).log_probs - log_probs).max() > 0
    longer = load(saved / "absolute.pt", saved / "text", extended_context=2)
    assert (longer.segment, longer.context) == (8, 2)


@pytest.mark.parametrize("kind", ["recurrent", "blocks"])
def test_generate_continues_a_prompt_with_the_likeliest_symbols(saved, kind):
    # generation treats each token as a segment
    length = 1 if kind == "recurrent" else None
    model = load(saved / f"{kind}.pt", saved / "text", tokens_per_sample=length)
    text = model.generate("abc", 4)
    for end in range(3, 7):
        scores = {
            letter: model.score(text[:end] + letter).log_probs[-1] for letter in "abcdefghijklmnop"
        }
        assert text[end] in ("<", max(scores, key=scores.get))
    for options in ({}, {"top_k": 3, "seed": 1}):
        (best,) = model.hypotheses("abc", 4, **options)
        assert (best.text == text) == (options == {})
        expected = model.score(best.text).log_probs
        np.testing.assert_allclose(best.log_probs[:7], expected, atol=2e-5)


def test_samples_depend_on_their_seed_and_temperature(models):
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
    warmer = [model.generate("ab", 30, sampling=True, temperature=t, seed=1) for t in (1.0, 3.0)]
    assert warmer[0] != warmer[1]


@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.8}, {"sampling": True}])
def test_samples_in_threads_depend_on_their_seed_alone(models, options):
    def sample(seed):
        return models("recurrent").generate("ab", 30, seed=seed, **options)

    expected = [sample(seed) for seed in range(8)]
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(sample, range(8))] == expected


def test_generate_stops_at_a_newline_if_asked_to(models):
    model = models("recurrent")
    samples = [model.generate("ab", 40, sampling=True, seed=seed) for seed in range(4)]
    assert any("\n" in sample for sample in samples)
    options = {"sampling": True, "stop_at_newline": True}
    lines = [model.generate("ab", 40, seed=seed, **options) for seed in range(4)]
    assert not any("\n" in line for line in lines)
    assert min(map(len, lines)) < 42
    # prompts of a list are continued one by one
    assert model.generate(["", "a", "\n"], 5) == [model.generate(p, 5) for p in ("", "a", "\n")]


@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("kind", ["recurrent", "blocks"])
def test_the_symbol_s_is_scored_and_generated_like_others(saved, kind, beam):
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
    best, *others = model.hypotheses("<s> a", 4, beam=beam)
    assert len(others) == beam - 1
    assert best.tokens == ["<s>", "a", *["<s>"] * 4]
    assert best.log_probs[2:] == pytest.approx([-0.1] * 4 + [0])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"beam": 3}, {"sampling": True, "seed": 1}])
@pytest.mark.parametrize("kind", ["recurrent", "blocks"])
def test_generate_repeats_no_sequence_if_asked_to(models, kind, size, options):
    model = models(kind)
    # as many tokens as blocks have positions for
    (best, *_) = model.hypotheses("a", 14, no_repeat_ngram_size=size, **options)
    assert len(best.tokens) == 15
    # generation starts after </s>
    tokens = ["</s>", *best.tokens]
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    assert len(set(grams)) == len(grams)
    # a prompt stays as it is
    assert model.generate("abab", 3, no_repeat_ngram_size=size).startswith("abab")


def test_a_model_warns_about_unknown_symbols_and_moves_to_a_device(saved, caplog):
    model = load(saved / "recurrent.pt", saved / "text", allow_unknown=True)
    model.score("a" * 97 + "xyz")
    assert "3.0 % of 100 tokens are <unk>" in caplog.text
    expected = model.score(TEXT).log_probs
    precise = model.to(torch.float64).score(TEXT).log_probs
    np.testing.assert_allclose(precise, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"length": 0}, "length is 0"),
        ({"top_k": 21}, "top_k is 21: .* at most the 20"),
        ({"top_p": 1.5}, r"top_p is 1.5: .*\(0, 1\]"),
        ({"top_p": 0.5, "top_k": 2}, "top_k and top_p"),
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": 2.0}, "temperature is 2.0, .*: give sampling, top_k or top_p"),
        ({"beam": 2, "sampling": True}, "beam is 2 with sampling"),
        ({"prompt": "a\nb", "stop_at_newline": True}, "the prompt .*stop_at_newline"),
        ({"prompt": "xyz"}, "the prompt .*'x', 'y', 'z'"),
        ({"length": 16}, r"length is 16 .*15"),
    ],
)
def test_generate_refuses_impossible_arguments(models, options, named):
    with pytest.raises(TypeError, match=r"generate\(\) .*'lenght'"):
        models("blocks").generate("a", lenght=9)
    with pytest.raises(ValueError, match=f"^{named}"):
        models("blocks").generate(**{"prompt": "a", "length": 9, **options})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "the text is empty"),
        (5, "the text is 5: .* a string"),
        ("az", "the text has symbols .*'z'.*allow_unknown=True"),
    ],
)
def test_a_stream_refuses_what_is_no_text(models, text, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        models("recurrent").stream().score(text)
