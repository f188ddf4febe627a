"""Prompts and segments get what each gets alone, and prompts the scores of an evaluation."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from fairseq_plugins.segment_language_model.options import SegmentLanguageModelingConfig
from fairseq_plugins.segment_language_model.streams import StreamIterator, TokenStreams
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from tests import tiny

EOS = 2
PROMPTS = [[5], [6, 7, 8, 9], [7, 8], [5, 6], [10] * 7, [9, 4], [9, 8, 7, 6]]


def spanned():
    model = tiny.tiny_model(adaptive_span=True, span_ramp=2)
    tiny.spread_spans(model)
    return model


MODELS = {
    "recurrence": lambda: tiny.tiny_transformer_xl(mem_len=20),
    "no recurrence": lambda: tiny.tiny_transformer_xl(mem_len=0),
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


def build_generator(models, past_eos=False, context=0, **options):
    """Return the task, with segments of 8 tokens, and its generator."""
    cfg = SegmentLanguageModelingConfig(
        continue_past_eos=past_eos, tokens_per_sample=8, extended_context=context
    )
    task = SegmentLanguageModelingTask(cfg, tiny.dictionary())
    options = {"beam": 1, "max_len_b": 14, "nbest": 1, **options}
    return task, task.build_generator(models, SimpleNamespace(**options))


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
    task, generator = build_generator([model], past_eos, **options)
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
    task, generator = build_generator([model], past_eos=True, beam=beam)
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


@pytest.mark.parametrize(
    ("options", "context"), [({"mem_len": 4}, 0), ({"mem_len": 0}, 0), ({"mem_len": 0}, 3)]
)
def test_prompts_are_scored_as_a_text_is_evaluated(options, context):
    """Prompts of several segments, some shorter, get the scores of each as a stream of its own."""
    model = tiny.tiny_transformer_xl(**options).double().eval()
    task, scorer = build_generator([model], context=context, score_reference=True)
    texts = [torch.tensor([*tiny.text(length).tolist(), EOS]) for length in (19, 5)]
    dataset = task.build_dataset_for_inference(texts, [len(text) for text in texts])
    sample = dataset.collater([dataset[0], dataset[1]])
    rows = task.inference_step(scorer, [model], sample)
    for text, (row,) in zip((texts[number] for number in sample["id"]), rows, strict=True):
        streams = TokenStreams(text.numpy(), tiny.dictionary(), 1, 8, context)
        batches = StreamIterator(streams, num_shards=1, shard_id=0).next_epoch_itr()
        expected = [scorer.generate([model], batch)[0][0]["positional_scores"] for batch in batches]
        assert torch.equal(row["tokens"], text)
        assert_close(row["positional_scores"], torch.cat(expected))
        assert_close(row["score"], torch.cat(expected).mean())


def log_probabilities(model, tokens):
    """Return the log-probabilities (V,) of each next symbol of a text, read in one pass."""
    source = torch.tensor([[EOS, *tokens[:-1]]])
    features, _ = model.decoder.extract_features(source)
    output = model.decoder.output_layer(features), None
    return model.get_normalized_probs(output, log_probs=True)[0].double()


ADAPTIVE = {**tiny.ADAPTIVE, "output_bias": True}


@pytest.mark.parametrize("temperature", [0.25, 1.0, 3.0])
@pytest.mark.parametrize(
    "searches", [{"beam": 3}, {"sampling": True, "sampling_topp": 0.9}], ids=str
)
@pytest.mark.parametrize(
    "options", [[{}], [ADAPTIVE], [{}, ADAPTIVE]], ids=["plain", "adaptive", "both"]
)
def test_temperature_raises_each_models_probabilities_to_a_power(options, searches, temperature):
    models = [
        tiny.tiny_transformer_xl(seed, mem_len=40, **each).double().eval()
        for seed, each in enumerate(options)
    ]
    _, generator = build_generator(models, past_eos=True, temperature=temperature, **searches)
    prefix, most = torch.tensor([[6, 7, 8, 9, 6, 7, 8, 9, 5]]), 14
    for hypothesis in generator.continue_prompts(prefix, torch.tensor([10]))[0]:
        tokens = hypothesis["tokens"][:most].tolist()
        tempered = [
            (log_probabilities(model, tokens) / temperature).softmax(-1) for model in models
        ]
        expected = sum(tempered).div(len(models)).log()[range(most), tokens]
        # nucleus sampling scores what it draws from
        assert_close(hypothesis["positional_scores"][:most].double(), expected, rtol=0, atol=2e-5)
        # the length ends the text, and is no symbol
        assert hypothesis["positional_scores"][most:].tolist() == [0.0]
        assert_close(hypothesis["score"].double(), expected.mean(), rtol=0, atol=2e-5)


def test_sampling_at_a_low_temperature_draws_the_likeliest_symbols():
    model = tiny.tiny_transformer_xl(mem_len=40, **ADAPTIVE).double().eval()
    prefix, lengths = torch.tensor([[6, 7, 8, 9, 5]]), torch.tensor([6])
    texts = {
        tuple(generator.continue_prompts(prefix, lengths)[0][0]["tokens"].tolist())
        for options in ({"beam": 1}, *[{"sampling": True, "temperature": 1e-6}] * 10)
        for _, generator in [build_generator([model], past_eos=True, **options)]
    }
    assert len(texts) == 1


@pytest.mark.parametrize("mem_len", [20, 0])
@pytest.mark.parametrize("options", [{"beam": 2}, {"sampling": True}], ids=str)
def test_a_prompt_takes_a_call_for_each_segment_and_new_symbol(options, mem_len):
    model = tiny.tiny_transformer_xl(mem_len=mem_len).eval()
    lengths = []
    model.decoder.network.register_forward_hook(
        lambda module, arguments, _: lengths.append(arguments[0].size(1))
    )
    _, generator = build_generator([model], past_eos=True, max_len_b=33, **options)
    generator.continue_prompts(torch.full((1, 30), 5), torch.tensor([31]))
    # </s> and 30 symbols in segments of 8; the last of 3 new symbols is not read; without
    # recurrence, the last 8 symbols of the prompt are read once more
    assert sorted(lengths) == [1, 1, 7, 8, 8, 8, *[8] * (mem_len == 0)]


@pytest.mark.parametrize("options", [{"mem_len": 4}, {"mem_len": 0}], ids=str)
def test_prompts_have_the_scores_of_an_evaluation(options):
    model = tiny.tiny_transformer_xl(**options).double().eval()
    prompt = tiny.text(19).tolist()
    task, scorer = build_generator([model], score_reference=True)
    text = torch.tensor([*prompt, EOS])
    dataset = task.build_dataset_for_inference([text], [len(text)])
    ((expected,),) = task.inference_step(scorer, [model], dataset.collater([dataset[0]]))
    _, generator = build_generator([model], past_eos=True, max_len_b=21)
    (hypothesis,) = generator.continue_prompts(torch.tensor([prompt]), torch.tensor([20]))[0]
    scores = hypothesis["positional_scores"][:19]
    assert_close(scores.float(), expected["positional_scores"][:19].float())


@pytest.mark.parametrize("temperature", [1e-30, 1e-40])
def test_a_temperature_near_0_draws_the_likeliest_symbol(temperature):
    model = tiny.tiny_transformer_xl(mem_len=20).eval()
    prefix, length = torch.tensor([[5, 6]]), torch.tensor([3])
    texts = [
        build_generator([model], past_eos=True, **options)[1]
        .continue_prompts(prefix, length)[0][0]["tokens"]
        .tolist()
        for options in ({"beam": 1}, {"sampling": True, "temperature": temperature})
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("min_len", "new"), [(1, 0), (3, 3)])
def test_a_line_may_end_at_once_behind_its_prompt_but_not_before_min_len(min_len, new):
    model = tiny.tiny_transformer_xl(mem_len=20).eval()
    normalize = model.get_normalized_probs

    def likely_end(*args, **options):
        probs = normalize(*args, **options)
        probs[..., EOS] = 0.0
        return probs

    model.get_normalized_probs = likely_end
    _, generator = build_generator([model], min_len=min_len)
    for prompt, shortest in (([5, 6], new), ([], max(new, 1))):
        prefix, length = torch.tensor([prompt]).long(), torch.tensor([len(prompt) + 1])
        (hypothesis,) = generator.continue_prompts(prefix, length)[0]
        assert len(hypothesis["tokens"]) == len(prompt) + shortest + 1
        assert hypothesis["tokens"][-1] == EOS
