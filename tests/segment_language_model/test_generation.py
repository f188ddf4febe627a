"""Prompts get what each gets alone; draws depend on their seed; changes to fairseq's searches."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.search import Sampling
from torch.testing import assert_close

from fairseq_plugins.segment_language_model.generation import adapt_generator
from fairseq_plugins.segment_language_model.options import SegmentLanguageModelingConfig
from fairseq_plugins.segment_language_model.streams import StreamPasts, TokenStreams
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from tests import tiny

EOS, END = 2, 0
PROMPTS = [[5], [6, 7, 8, 9], [7, 8], [5, 6], [10] * 7]


def spanned():
    model = tiny.tiny_model(adaptive_span=True, span_ramp=2)
    tiny.spread_spans(model)
    return model


MODELS = {
    "recurrence": lambda: tiny.tiny_transformer_xl(mem_len=20),
    "short recurrence": lambda: tiny.tiny_transformer_xl(mem_len=2),
    "sinusoidal-absolute": lambda: tiny.tiny_transformer_xl(
        positions="sinusoidal-absolute", tokens_per_sample=20
    ),
    "spans": spanned,
}
SEARCHES = [
    {"beam": 1},
    {"beam": 3, "min_len": 4, "lenpen": 0.5},
    {"beam": 2, "min_len": 12},
    {"beam": 2, "no_repeat_ngram_size": 2},
    {"sampling": True, "sampling_topk": 1},
]


def build_generator(model, past_eos=False, context=0, **options):
    """Return the task, with segments of 8 tokens, and its generator."""
    cfg = SegmentLanguageModelingConfig(
        continue_past_eos=past_eos, tokens_per_sample=8, extended_context=context
    )
    task = SegmentLanguageModelingTask(cfg, tiny.dictionary())
    options = {"beam": 1, "max_len_b": 14, "nbest": 1, **options}
    return task, task.build_generator([model], SimpleNamespace(**options))


def generate(task, generator, model, sample, prefix=None):
    """Return tokens and scores of all hypotheses of each row."""
    rows = task.inference_step(generator, [model], sample, prefix_tokens=prefix)
    return [[(one["tokens"].tolist(), one["score"].item()) for one in row] for row in rows]


def assert_alike(actual, expected):
    assert [[tokens for tokens, _ in row] for row in actual] == [
        [tokens for tokens, _ in row] for row in expected
    ]
    scores = ([score for row in rows for _, score in row] for rows in (actual, expected))
    assert_close(*map(torch.tensor, scores))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("past_eos", [False, True])
@pytest.mark.parametrize("options", SEARCHES, ids=str)
def test_prompts_in_a_batch_are_continued_as_each_is_alone(name, past_eos, options):
    model = MODELS[name]().double().eval()
    task, generator = build_generator(model, past_eos, **options)
    texts = [torch.tensor([*prompt, EOS]) for prompt in PROMPTS]
    dataset = task.build_dataset_for_inference(texts, [len(text) for text in texts])

    def batch(*numbers):
        sample = dataset.collater([dataset[number] for number in numbers])
        order = sample["id"].tolist()
        rows = generate(task, generator, model, sample)
        return [rows[order.index(number)] for number in numbers]

    alone = [row for number in range(len(texts)) for row in batch(number)]
    for number, row in enumerate(alone):
        for tokens, _ in row:
            assert tokens[: len(PROMPTS[number])] == PROMPTS[number]
            new = len(tokens) - len(PROMPTS[number]) - 1
            assert new >= min(options.get("min_len", 0), 14 - len(PROMPTS[number]))
            assert len(tokens) <= 15
    assert_alike(batch(*range(len(texts))), alone)
    assert_alike(batch(1, 0) + batch(3, 4, 2), [alone[i] for i in (1, 0, 3, 4, 2)])


@pytest.mark.parametrize("prefix_size", [None, 3, 5])
@pytest.mark.parametrize("length", [23, 29])
@pytest.mark.parametrize("beam", [1, 2])
def test_segments_in_a_batch_are_continued_as_each_is_alone(prefix_size, length, beam):
    """The last segment is shorter, and in some streams it has no token."""
    model = tiny.tiny_transformer_xl(mem_len=20).double().eval()
    task, generator = build_generator(model, past_eos=True, beam=beam)
    streams = TokenStreams(tiny.text(length), tiny.dictionary(), 4, 5)
    for first in range(0, len(streams), 4):
        items = [streams[number] for number in range(first, first + 4)]
        filled = [item for item in items if len(item["target"]) > 0]

        def search(items):
            sample = streams.collater(items)
            prefix = None if prefix_size is None else sample["target"][:, :prefix_size]
            rows = generate(task, generator, model, sample, prefix)
            # fairseq-generate goes on with the rows of the batch
            assert len(rows) == len(sample["id"]) == len(sample["target"])
            assert all(target.ne(tiny.dictionary().pad()).any() for target in sample["target"])
            return sample["id"].tolist(), rows

        numbers, rows = search(items)
        assert numbers == [item["id"] for item in filled]
        alone = [search([item]) for item in filled]
        assert numbers == [number for (number,), _ in alone]
        assert_alike(rows, [row for _, (row,) in alone])


def test_only_streams_that_have_a_token_are_scored():
    model = tiny.tiny_transformer_xl().double().eval()
    task, scorer = build_generator(model, score_reference=True)
    streams = TokenStreams(tiny.text(22), tiny.dictionary(), 4, 5)
    sample = streams.collater([streams[number] for number in range(4, 8)])
    rows = task.inference_step(scorer, [model], sample)
    assert [len(row[0]["tokens"]) for row in rows] == [1, 1]
    assert sample["id"].tolist() == [4, 5]


@pytest.mark.parametrize(
    ("options", "context"), [({"mem_len": 4}, 0), ({"mem_len": 0}, 0), ({"mem_len": 0}, 3)]
)
def test_prompts_are_scored_as_a_text_is_evaluated(options, context):
    """Prompts of several segments, some shorter, get the scores of each as a stream of its own."""
    model = tiny.tiny_transformer_xl(**options).double().eval()
    task, scorer = build_generator(model, context=context, score_reference=True)
    dictionary, segment = tiny.dictionary(), task.cfg.tokens_per_sample
    texts = [torch.from_numpy(tiny.text(length).astype("int64")) for length in (2 * segment + 3, 5)]
    prompts = [torch.cat([torch.tensor([EOS]), text]) for text in texts]
    source = torch.nn.utils.rnn.pad_sequence(prompts, True, dictionary.pad())
    lengths = torch.tensor(list(map(len, prompts)))
    sample = {"net_input": {"src_tokens": source, "src_lengths": lengths}}
    rows = task.inference_step(scorer, [model], sample)
    for text, (row,) in zip(texts, rows, strict=True):
        tokens = torch.cat([text, torch.tensor([EOS])])
        streams = TokenStreams(tokens.numpy(), dictionary, 1, segment, context)
        batches, pasts = (
            [streams.collater([streams[i]]) for i in range(len(streams))],
            StreamPasts(),
        )
        for number, batch in enumerate(batches):
            batch["net_input"] |= {"pasts": pasts, "start": number * segment}
        expected = [scorer.generate([model], batch)[0][0]["positional_scores"] for batch in batches]
        assert torch.equal(row["tokens"], tokens)
        assert_close(row["positional_scores"], torch.cat(expected))
        assert_close(row["score"], torch.cat(expected).mean())


def test_draws_depend_on_the_seed_alone():
    log_probs, draws = torch.randn(3, 1, 20).log_softmax(-1), {}
    for seed in (1, 1, 2):
        generator = SimpleNamespace(
            search=Sampling(tiny.dictionary()),
            tgt_dict=tiny.dictionary(),
            **{"eos": EOS, "pad": 1, "min_len": 1, "repeat_ngram_blocker": None},
        )
        search = adapt_generator(generator, seed).search
        torch.manual_seed(len(draws))
        state = torch.get_rng_state()
        drawn = [search.step(0, log_probs.clone(), None)]
        scores = drawn[0][0].unsqueeze(-1)
        drawn += [search.step(1, log_probs.clone(), scores) for _ in range(20)]
        assert torch.equal(torch.get_rng_state(), state)
        for score, symbols, beams in drawn[:2]:
            expected = log_probs.squeeze(1).gather(1, symbols)
            assert_close(score, expected + (0 if score is drawn[0][0] else scores.squeeze(-1)))
            assert not beams.any()
        symbols = torch.cat([symbols for _, symbols, _ in drawn])
        assert torch.equal(draws.setdefault(seed, symbols), symbols)
    assert not torch.equal(draws[1], draws[2])
    # a new text begins with the seed again
    assert torch.equal(search.step(0, log_probs.clone(), None)[1], draws[2][:3])


def search_that_ends_by_length(kind, **options):
    """Return the search of a generator that waits for a symbol which fairseq makes impossible."""
    generator = SimpleNamespace(search=kind(tiny.dictionary(), **options), eos=END, pad=END)
    generator.min_len, generator.repeat_ngram_blocker = 1, None
    return adapt_generator(generator).search


def log_probabilities(only_the_end):
    """Return log-probabilities of one prompt and beam, as fairseq's search gets them."""
    symbols = len(tiny.dictionary())
    lprobs = torch.randn(1, 1, symbols).log_softmax(-1)
    lprobs[..., END] = -torch.inf
    if only_the_end:
        lprobs[..., END + 1 :] = -torch.inf
    return lprobs


@pytest.mark.parametrize("options", [{}, {"sampling_topp": 0.9}, {"sampling_topk": 3}])
def test_a_search_draws_the_end_at_no_cost_if_nothing_else_is_left(options):
    search = search_that_ends_by_length(Sampling, **options)
    scores, symbols, _ = search.step(1, log_probabilities(True), torch.full((1, 1, 1), -2.5))
    assert (symbols.item(), scores.item()) == (END, -2.5)
    # all other attributes are those of the search itself
    assert search.sampling_topk == options.get("sampling_topk", -1)
