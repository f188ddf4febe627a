"""The adaptive softmax's loss counts every token; fairseq's own does not."""

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from fairseq_plugins.segment_language_model.adaptive_softmax import ExactAdaptiveLoss
from tests.reference.adaptive_softmax import log_probability
from tests.tiny import ADAPTIVE, VOCABULARY, tiny_model, tiny_task


def every_symbol():
    """A batch that predicts each symbol once, </s> and <unk> included, and ends in padding."""
    target = torch.tensor([[2, 3, *range(4, VOCABULARY), 1, 1]])
    source = target.roll(1, dims=1)
    return {"net_input": {"src_tokens": source}, "target": target, "ntokens": VOCABULARY - 2}


def test_loss_and_gradients_equal_the_full_distribution():
    model = tiny_model(**ADAPTIVE).double()
    sample = every_symbol()
    target = sample["target"]
    loss, size, log = ExactAdaptiveLoss(tiny_task(), sentence_avg=False)(model, sample)
    assert (size, log["ntokens"]) == (VOCABULARY - 2, VOCABULARY - 2)
    fast = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)

    features = model(sample["net_input"]["src_tokens"])[0]
    picked = [
        -log_probability(model.decoder.adaptive_softmax, x, symbol)
        for x, symbol in zip(features[0], target[0].tolist(), strict=True)
        if symbol != 1
    ]
    expected = sum(picked)
    torch.testing.assert_close(loss.squeeze(), expected, check_dtype=False, atol=1e-5, rtol=0)
    slow = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    for one, other in zip(fast, slow, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_evaluation_scores_are_those_of_the_loss():
    model = tiny_model(**ADAPTIVE).eval()
    sample = every_symbol()
    with torch.no_grad():
        loss = ExactAdaptiveLoss(tiny_task(), sentence_avg=False)(model, sample)[0]
        scores = model(sample["net_input"]["src_tokens"])
        probs = model.get_normalized_probs(scores, log_probs=True, sample=sample)
    target = sample["target"]
    picked = probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)[target != 1]
    torch.testing.assert_close(loss.squeeze(), -picked.sum())


def test_fairseqs_own_leaves_a_symbol_of_each_tail_cluster_out():
    model = tiny_model(**ADAPTIVE)
    sample = every_symbol()
    theirs = AdaptiveLoss(tiny_task(), sentence_avg=False)(model, sample)[0]
    ours = ExactAdaptiveLoss(tiny_task(), sentence_avg=False)(model, sample)[0]
    assert theirs.item() < ours.item() - 1


def test_a_model_without_adaptive_softmax_is_refused():
    with pytest.raises(ValueError, match="exact_adaptive_loss needs --adaptive-softmax-cutoff"):
        ExactAdaptiveLoss(tiny_task(), sentence_avg=False)(tiny_model(), every_symbol())


def test_criteria_for_plain_softmaxes_are_refused():
    with pytest.raises(ValueError, match="--adaptive-softmax-cutoff needs --criterion exact_ad"):
        CrossEntropyCriterion(tiny_task(), sentence_avg=False)(
            tiny_model(**ADAPTIVE), every_symbol()
        )


def test_tied_clusters_are_the_embeddings():
    model = tiny_model(**ADAPTIVE)
    head = model.decoder.adaptive_softmax.head.word_proj.weight
    assert head is model.decoder.embed_tokens.embeddings[0][0].weight
