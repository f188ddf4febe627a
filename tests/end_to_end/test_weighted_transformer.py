"""The Weighted Transformer through fairseq's commands: training, translating."""

import math
import re

import pytest
import torch

import fairseq_plugins
from scripts.evaluate import translation as evaluate_translation
from tests.end_to_end.commands import ALL, USER_DIR, run, run_here
from tests.end_to_end.trainings import training_command, translation_command
from tests.weighted_transformer.tiny import assert_on_simplex


@pytest.fixture(scope="module")
def checkpoint(trained):
    return trained("weighted_transformer") / "checkpoint_last.pt"


def test_training_keeps_branch_weights_on_the_simplex(checkpoint):
    state = torch.load(checkpoint, weights_only=True)
    branches = [x for name, x in state["model"].items() if name.endswith((".kappa", ".alpha"))]
    assert len(branches) == 4
    assert_on_simplex(*branches)
    groups = state["last_optimizer_state"]["param_groups"][1:]
    assert [group["updates"] for group in groups] == [20, 20]


@pytest.fixture(scope="module")
def generated(pairs, checkpoint):
    """Return the scores and texts that fairseq-generate printed, by the number of the sentence."""
    words = ("--path", checkpoint, "--beam", 4, "--print-alignment", "--lenpen", 0.6)
    printed = run("fairseq-generate", pairs, *USER_DIR, *words, *ALL, "--batch-size", 8, "--cpu")
    assert len(re.findall(r"^A-\d+\t", printed, re.MULTILINE)) == 31
    lines = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed, re.MULTILINE)
    hypotheses = {int(number): (float(score), text) for number, score, text in lines}
    assert sorted(hypotheses) == list(range(31))
    return hypotheses


def test_evaluation_translates_with_learned_or_uniform_branch_weights(
    pairs, checkpoint, generated, tmp_path, monkeypatch
):
    translations = {}
    monkeypatch.setattr(evaluate_translation, "run_child", run_here)
    for replaced in ("learned", "uniform"):
        output = tmp_path / replaced
        words = (pairs, "--path", checkpoint, "--beam", 4, "--branch-weights", replaced)
        words += ("--source-lang", "en", "--target-lang", "de", "--output", output)
        words += ("--reference", pairs.parent / "test.de")
        words += ("--", "--num-workers", 0, "--cpu", "--batch-size", 8)
        assert evaluate_translation.main(list(map(str, words))) == 0
        text = (output / "translation.txt").read_text(encoding="utf-8")
        translations[replaced] = text.splitlines()
    # translations are in the order of the text; fairseq-generate prints another order
    in_order = [text for _, (_, text) in sorted(generated.items())]
    assert translations["learned"] == evaluate_translation.detokenize(in_order, "de")
    assert translations["uniform"] != translations["learned"]


def test_python_translates_as_fairseq_does(pairs, checkpoint, generated):
    sentences = (pairs.parent / "test.en").read_text(encoding="utf-8").splitlines()
    # fairseq-generate also batches sentences of similar length, so that results are the same
    options = {"beam": 4, "batch_size": 8, "length_penalty": 0.6}
    hypotheses = fairseq_plugins.load(checkpoint, pairs).hypotheses(sentences, **options)
    assert len(hypotheses) == 31
    for number, (score, text) in generated.items():
        best = hypotheses[number][0]
        assert best.text == text
        assert best.score / math.log(2) == pytest.approx(score, abs=1e-5)
    uniform = fairseq_plugins.load(checkpoint, pairs, branch_weights="uniform")
    (other,) = uniform.hypotheses(sentences[:1], **options)
    assert other[0].score != hypotheses[0][0].score


def test_a_model_validated_by_translating_is_loaded(corpora, pairs, tmp_path):
    best = ("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric")
    words = ("--max-update", 2, "--eval-bleu", *best)
    printed = run(*training_command(corpora, "weighted_transformer", tmp_path, *words))
    assert re.search(r'"valid_bleu": "[\d.]+"', printed)
    translated = run(*translation_command(pairs, tmp_path / "checkpoint_best.pt"))
    assert len(re.findall(r"^H-\d+\t", translated, re.MULTILINE)) == 31
