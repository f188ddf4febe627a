"""Errors of loading, scoring and generating name the argument, its value and a remedy."""

import re

import pytest

from fairseq_plugins import load

LONG = "a " * 1024
# a model's kind, a method and its arguments, the start of the error, and words in it
REFUSED = [
    *(
        ("recurrent", "generate", {"prompt": "a", **given}, *words)
        for given, *words in (
            ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1", "at least 0"),
            ({"length": 0}, "length is 0", "at least 1"),
            ({"beam": 0}, "beam is 0", "at least 1"),
            ({"top_k": 0}, "top_k is 0", "at least 1"),
            ({"top_k": 21}, "top_k is 21", "at most the 20"),
            ({"top_p": 1.5}, "top_p is 1.5", "(0, 1]"),
            ({"top_p": 0.5, "top_k": 2}, "top_k and top_p", "leave one out"),
            ({"temperature": 0}, "temperature is 0", "above 0"),
            ({"beam": 2, "sampling": True}, "beam is 2 with sampling", "leave one"),
            ({"prompt": "a\nb", "stop_at_newline": True}, "the prompt", "stop_at_newline"),
            ({"prompt": "xyz"}, "the prompt", "'x', 'y', 'z'"),
        )
    ),
    ("blocks", "generate", {"prompt": "a", "length": 16}, "length is 16", "15"),
    ("recurrent", "score", {"text": ""}, "the text is empty", "at least one symbol"),
    ("recurrent", "score", {"text": ["a", "z"]}, "text 2 has symbols", "'z'", "allow_unknown=True"),
    ("recurrent", "score", {"text": ["a"], "batch_size": 0}, "batch_size is 0", "at least 1"),
    ("recurrent", "stream", {"text": 5}, "the text is 5", "a string"),
    *(
        ("bos", method, {argument: "a"}, "the model was trained with --add-bos-token")
        for method, argument in (("score", "text"), ("generate", "prompt"), ("stream", "text"))
    ),
    *(
        ("pairs", "translate", {"text": ["a"], **given}, *words)
        for given, *words in (
            ({"text": [5]}, "sentence 1 is 5", "a string"),
            ({"text": [LONG]}, "sentence 1 has 1024 units", "1023"),
            ({"beam": 0}, "beam is 0", "at least 1"),
            ({"batch_size": 0}, "batch_size is 0", "at least 1"),
            ({"max_len_b": 0}, "max_len_b is 0", "at least 1"),
        )
    ),
    ("pairs", "hypotheses", {"sentences": "a b"}, "sentences is 'a b'", "a list"),
    ("pairs", "score", {"source": ["a"], "target": "b"}, "source and target", "two lists"),
    ("pairs", "score", {"source": ["a"], "target": ["b", "c"]}, "source and target", "two lists"),
    ("pairs", "score", {"source": ["a"], "target": [LONG]}, "translation 1 has 1024 units", "1023"),
    ("pairs", "score", {"source": ["a"], "target": ["b"], "batch_size": 0}, "batch_size is 0"),
    *(
        (kind, "score_split", given, *words)
        for kind, given, *words in (
            ("recurrent", {"split": "dev"}, "split dev: no data at", "dev.bin"),
            ("pairs", {"split": "dev"}, "split dev: no data at", "dev.lower-upper.upper"),
            ("recurrent", {"extended_context": 5}, "extended_context is 5", "mem_len=0"),
            ("recurrent", {"batch_size": 98}, "batch_size is 98", "97 tokens"),
            ("blocks", {"extended_context": 7}, "tokens_per_sample is 10", "extended_context 7"),
        )
    ),
    *(
        (kind, "load", given, *words)
        for kind, given, *words in (
            ("none at all", {}, "there is no ", "none at all.pt"),
            ("recurrent", {"mem_lne": 3}, "mem_lne is not an option", "leave it out"),
            ("recurrent", {"decoder_layers": 3}, "decoder_layers is not an option", "leave it out"),
            ("recurrent", {"bpe_codes": "f"}, "bpe_codes is not an option", "(None, None)"),
            ("recurrent", {"tokens_per_sample": 0}, "tokens_per_sample is 0", "at least 1"),
            ("recurrent", {"extended_context": 4}, "extended_context is 4", "mem_len=0"),
            ("absolute", {"mem_len": 5}, "", "absolute.pt with the dictionary in", "--mem-len"),
            ("blocks", {"extended_context": 7}, "tokens_per_sample is 10", "extended_context 7"),
            ("blocks", {"tokens_per_sample": 17}, "tokens_per_sample is 17", "16 tokens"),
            ("recurrent", {"unit": "letters"}, "unit is 'letters'", "characters, bytes, words"),
            ("recurrent", {"attention_kernel": "x"}, "", "'x'", "attention_kernel", "plain"),
            ("pairs", {"tokens_per_sample": 4}, "tokens_per_sample is 4", "a translation model"),
            ("pairs", {"source_lang": "lower", "target_lang": "other"}, "", "dict.other.txt"),
        )
    ),
]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: f"{case[:2]} {case[3:]}")
def test_what_cannot_be(saved, models, case):
    kind, method, given, start, *words = case
    use = {
        "load": lambda data: load(saved / f"{kind}.pt", saved / data, **given),
        "stream": lambda data: models(kind).stream().score(**given),
    }.get(method, lambda data: getattr(models(kind), method)(**given))
    with pytest.raises(ValueError, match=r".") as refusal:
        use("pairs" if kind == "pairs" else "text")
    message = str(refusal.value)
    assert message.startswith(start)
    assert [word for word in words if word not in message] == []


def test_a_folder_without_a_checkpoint(tmp_path):
    names = "checkpoint_best.pt, checkpoint_last.pt or checkpoint.pt"
    message = re.escape(f"{tmp_path} has no {names}: name a checkpoint")
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
