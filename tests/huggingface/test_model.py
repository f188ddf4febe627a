"""Converted models score, learn and generate as the checkpoints that they come from."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fairseq_plugins.segment_language_model.adaptive_softmax import adaptive_cross_entropy
from tests.huggingface.conftest import KINDS, RECURRENT
from tests.modules.test_without_fairseq import run_without_fairseq

TEXT = "abcdef\nghij\n\nklmnop" + "aabbcc" * 4


@torch.no_grad()
def log_probs(model, tokenizer, text):
    """Return the log-probabilities of the tokens of a text."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    scores = model(ids).logits.log_softmax(-1)
    return scores[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1).numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_scores_a_text_as_its_checkpoint_does(converted, kind):
    one = converted(kind)
    # without recurrence, evaluation reads each segment by itself
    text = TEXT if kind in RECURRENT else TEXT[:7]
    expected = one.ours.score(text).log_probs
    np.testing.assert_allclose(log_probs(one.load(), one.tokenizer, text), expected, atol=1e-5)
    np.testing.assert_array_equal(one.back.score(text).log_probs, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_has_the_loss_and_gradients_of_its_checkpoint(converted, kind):
    one = converted(kind)
    model, theirs = one.load().train(), one.ours.model.train()
    ids = one.tokenizer(TEXT[:7], return_tensors="pt").input_ids
    loss = model(ids, labels=ids).loss
    loss.backward()
    source, target = ids[:, :-1].masked_fill(ids[:, :-1] == 0, 2), ids[:, 1:]
    features, _ = theirs.decoder.extract_features(source)
    if theirs.decoder.adaptive_softmax is not None:
        expected = adaptive_cross_entropy(theirs.decoder.adaptive_softmax, features, target, 1)
        expected = expected / target.numel()
    else:
        expected = F.cross_entropy(theirs.decoder.output_layer(features)[0], target[0])
    theirs.zero_grad()
    expected.backward()
    theirs.eval()
    torch.testing.assert_close(loss, expected)
    gradients = {name: each.grad for name, each in theirs.decoder.named_parameters()}
    for name, parameter in model.named_parameters():
        if gradients[name] is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], msg=name)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("kind", ["tied", "places", "spans", "tied_head"])
def test_generate_gives_the_texts_and_scores_of_ours(converted, kind, beams):
    one, prompt, length = converted(kind), "abca", 3 if kind == "places" else 20
    inputs = one.tokenizer(prompt, return_tensors="pt")
    made = one.load().generate(
        **inputs,
        max_new_tokens=length,
        num_beams=beams,
        num_return_sequences=beams,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for number, expected in enumerate(one.ours.hypotheses(prompt, length, beam=beams)):
        assert one.tokenizer.decode(made.sequences[number][1:]) == expected.text
        if beams > 1:
            new = expected.log_probs[len(prompt) :].sum() / length
            assert made.sequences_scores[number].item() == pytest.approx(new, abs=1e-5)


@pytest.mark.parametrize("beams", [1, 2])
def test_rows_with_padding_get_what_they_get_alone(converted, beams):
    one, prompts = converted("tied"), ["ab", "cdefghijklmn", "o", "pa"]
    batch = one.tokenizer(prompts, padding=True, return_tensors="pt")
    made = one.load().generate(**batch, max_new_tokens=12, num_beams=beams)
    texts = one.tokenizer.batch_decode(made, skip_special_tokens=True)
    assert texts == [one.ours.hypotheses(each, 12, beam=beams)[0].text for each in prompts]


def test_nothing_follows_padding(converted):
    one = converted("tied")
    model, ids = one.load(), torch.tensor([[0, 5, 6], [0, 7, 1]])
    cache = model(ids, (ids != 1).long()).past_key_values
    with pytest.raises(ValueError, match="give tokenizer"):
        model(ids[:, :1], past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask .* gaps"):
        model(ids, torch.tensor([[1, 1, 1], [1, 0, 1]]))


@torch.no_grad()
def test_a_cache_goes_on_where_the_text_ended(converted):
    one = converted("tied")
    model, ids = one.load(), one.tokenizer(TEXT, return_tensors="pt").input_ids
    first = model(ids[:, :16])
    second = model(ids[:, 16:], past_key_values=first.past_key_values, logits_to_keep=2)
    torch.testing.assert_close(second.logits, model(ids, use_cache=False).logits[:, -2:])


def test_a_model_without_recurrence_reads_no_more_than_a_segment(converted):
    model = converted("places").load()
    with pytest.raises(ValueError, match=r"mem_len is 0\) and reads 8 tokens, not 9"):
        model(torch.full((1, 9), 5))
    cache = model(torch.full((1, 8), 5)).past_key_values
    with pytest.raises(ValueError, match="reads 8 tokens, not 9"):
        model(torch.full((1, 1), 5), cache=cache)


def test_a_saved_model_is_the_same(converted, tmp_path):
    one = converted("spans")
    model = one.load()
    model.save_pretrained(tmp_path)
    one.tokenizer.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert type(one.tokenizer).from_pretrained(tmp_path)("abc\n") == one.tokenizer("abc\n")
    half = one.load(dtype=torch.bfloat16).state_dict()
    single = {name for name, value in half.items() if value.dtype == torch.float32}
    assert single == {name for name in half if name.endswith("span.value")}


@pytest.mark.parametrize("kind", ["tied", "tied_head"])
def test_trainer_lowers_the_loss(converted, kind, tmp_path):
    pytest.importorskip("accelerate", reason="pip install '.[huggingface]'")
    from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

    one, ids = converted(kind), [4 + i % 16 for i in range(400)]
    data = [{"input_ids": ids[i : i + 20 + i % 3]} for i in range(0, 360, 9)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=30,
        learning_rate=1e-2,
        logging_steps=5,
        gradient_checkpointing=kind == "tied",
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        use_cpu=True,
    )
    collate = DataCollatorForLanguageModeling(one.tokenizer, mlm=False)
    trainer = Trainer(one.load(), arguments, collate, data, eval_dataset=data[:4])
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert losses[-1] < 0.7 * losses[0]
    assert trainer.evaluate()["eval_loss"] < losses[0]


def test_low_rank_adapters_train_save_and_merge(converted, tmp_path):
    peft = pytest.importorskip("peft", reason="pip install '.[huggingface]'")
    one = converted("tied")
    options = peft.LoraConfig(target_modules=["q_proj", "v_proj", "fc1"], init_lora_weights=False)
    model = peft.get_peft_model(one.load(), options)
    ids = one.tokenizer(TEXT, return_tensors="pt").input_ids
    model(input_ids=ids, labels=ids).loss.backward()
    trained = {name for name, each in model.named_parameters() if each.grad is not None}
    assert len(trained) == 2 * 3 * 3
    assert all("lora_" in name for name in trained)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(one.load(), tmp_path).eval()
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        torch.testing.assert_close(again(input_ids=ids).logits, expected)
        torch.testing.assert_close(again.merge_and_unload()(ids).logits, expected)
        assert not torch.allclose(one.load()(ids).logits, expected, atol=1e-2)


@pytest.mark.parametrize("kind", ["tied", "tied_head"])
def test_the_harness_gives_the_bits_of_score(converted, kind):
    harness = pytest.importorskip("lm_eval.models.huggingface", reason="pip install lm_eval")
    from lm_eval.api.instance import Instance

    one, options = converted(kind), {"device": "cpu", "batch_size": 2, "max_length": 10_000}

    def total(text):
        return one.ours.score(text).log_probs.sum() / np.log(2)

    texts, pairs = [TEXT, "abc"], [("abc", "de"), (TEXT, "aab"), ("p", "\no")]
    for method, arguments, expected in (
        ("loglikelihood_rolling", [(text,) for text in texts], [total(text) for text in texts]),
        ("loglikelihood", pairs, [total(first + then) - total(first) for first, then in pairs]),
    ):
        model = harness.HFLM(
            str(one.folder), backend="causal", add_bos_token=method == "loglikelihood", **options
        )
        scores = getattr(model, method)([Instance(method, {}, each, 0) for each in arguments])
        nats = [one_score if isinstance(one_score, float) else one_score[0] for one_score in scores]
        np.testing.assert_allclose(np.array(nats) / np.log(2), expected, atol=1e-4)


@pytest.mark.slow  # starts a Python process
def test_a_model_works_without_fairseq(converted):
    one = converted("tied")
    script = f"""
import fairseq_plugins.huggingface
from transformers import pipeline
generate = pipeline("text-generation", {str(one.folder)!r})
print(generate("abc", max_new_tokens=9, do_sample=False)[0]["generated_text"])
"""
    assert run_without_fairseq(script)[0] == one.ours.generate("abc", 9) + "\n"
