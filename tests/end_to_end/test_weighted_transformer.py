"""The Weighted Transformer through fairseq's commands: training, resuming, generating."""

import math
import re

import pytest
import torch

import fairseq_plugins
from scripts.evaluate import translation as evaluate_translation
from tests.end_to_end.commands import ALL, USER_DIR, forked, run
from tests.weighted_transformer.tiny import assert_on_simplex

MODEL = (
    *("--arch", "weighted_transformer_tiny", "--share-decoder-input-output-embed"),
    *("--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64),
    *("--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64),
    *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1),
    *("--branch-warmup-updates", 5, "--lr", 0.005, "--cpu", "--max-tokens", 200, *ALL),
    *("--log-format", "simple", "--no-epoch-checkpoints", "--seed", 1),
)
LANGUAGES = ("--source-lang", "en", "--target-lang", "de")
OPTIMIZER = ("--optimizer", "adam_with_branch_weights", "--adam-betas", "(0.9, 0.98)")


def train(pairs, folder, *options):
    save = ("--save-dir", folder)
    return run("fairseq-train", pairs, *USER_DIR, *MODEL, *OPTIMIZER, *save, *options)


def branch_weights(folder):
    model = torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]
    found = {name: x for name, x in model.items() if name.endswith((".kappa", ".alpha"))}
    assert len(found) == 8
    return found


def saved_updates(folder):
    """How many updates each branched attention's schedule counts."""
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)["last_optimizer_state"]
    return [group["updates"] for group in state["param_groups"][1:]]


@pytest.fixture(scope="module")
def model(pairs, tmp_path_factory):
    """Folder of a model after two epochs, and the log of its training."""
    folder = tmp_path_factory.mktemp("weighted transformer")
    return folder, train(pairs, folder, "--max-epoch", 2, "--tensorboard-logdir", folder / "board")


def test_it_is_trained_and_its_weights_are_logged(model):
    folder, printed = model
    assert_on_simplex(*branch_weights(folder).values())
    assert "kappa and alpha of 4 layers have their own schedule" in printed
    (last,) = re.findall(r"epoch 002 \| valid on 'valid' subset \|.*", printed)
    figures = dict(re.findall(r"((?:en|de)coder\d_(?:kappa|alpha)\d) ([\d.]+)", last))
    assert len(figures) == 4 * 2 * 4
    of_layer = [float(figures[f"decoder2_alpha{i}"]) for i in (1, 2, 3, 4)]
    name = "decoder.layers.1.fc2.weights.alpha"
    assert of_layer == pytest.approx(branch_weights(folder)[name].tolist(), abs=1e-3)
    (board,) = (folder / "board" / "valid").glob("events.*")
    # tags are in there as they are; a forked process may end before the last ones are written
    assert [name for name in figures if name.encode() not in board.read_bytes()] == []


@pytest.fixture(scope="module")
def translate(pairs, model):
    """Translate with fairseq-generate; returns what it printed."""

    def translate(*options):
        path = ("--path", model[0] / "checkpoint_last.pt", "--beam", 4, "--print-alignment")
        how = (*ALL, "--batch-size", 8, "--cpu", *options)
        return run("fairseq-generate", pairs, *USER_DIR, *path, *how)

    return translate


def test_translations_are_evaluated_with_what_weighs_the_branches(
    pairs, model, translate, tmp_path, monkeypatch
):
    found = {}
    monkeypatch.setattr(evaluate_translation, "child_process", forked)
    for replaced in ("learned", "uniform"):
        output = tmp_path / replaced
        words = (pairs, "--path", model[0] / "checkpoint_last.pt", *LANGUAGES, "--beam", 4)
        words += ("--reference", pairs.parent / "test.de", "--branch-weights", replaced)
        words += ("--output", output, "--", "--num-workers", 0, "--cpu", "--batch-size", 8)
        assert evaluate_translation.main(list(map(str, words))) == 0
        found[replaced] = (output / "translation.txt").read_text(encoding="utf-8").splitlines()
    # in the order of the text, which is another one than that of fairseq-generate
    of_place = dict(re.findall(r"^H-(\d+)\t\S+\t(.*)$", translate(), re.MULTILINE))
    in_order = [of_place[str(number)] for number in range(31)]
    assert found["learned"] == evaluate_translation.detokenize(in_order, "de")
    assert len(set(in_order)) > 2
    assert found["uniform"] != found["learned"]


def test_python_translates_as_fairseq_does(pairs, model, translate):
    loaded = fairseq_plugins.load(model[0])
    sentences = (pairs.parent / "test.en").read_text(encoding="utf-8").splitlines()
    # fairseq-generate takes batches of like length, too, and computes no sentence otherwise
    options = {"beam": 4, "batch_size": 8, "length_penalty": 0.6}
    found = loaded.hypotheses(sentences, **options)
    printed = translate("--lenpen", 0.6)
    assert len(re.findall(r"^A-\d+\t", printed, re.MULTILINE)) == 31
    printed = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed, re.MULTILINE)
    assert len(printed) == len(sentences) == 31
    for number, score, text in printed:
        best = found[int(number)][0]
        assert best.text == text
        assert best.score / math.log(2) == pytest.approx(float(score), abs=1e-5)
    uniform = fairseq_plugins.load(model[0], pairs, branch_weights="uniform")
    (other,) = uniform.hypotheses(sentences[:1], **options)
    assert other[0].score != found[0][0].score


def test_python_takes_moses_and_bpe_steps_as_fairseq_interactive_does(pairs, model, tmp_path):
    codes = tmp_path / "codes"
    # of letters, which are unknown, but for one word
    codes.write_text("#version: 0.2\nc a\nca t</w>\n", encoding="utf-8")
    steps = {"tokenizer": "moses", "bpe": "subword_nmt", "bpe_codes": str(codes)}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in steps.items()]
    path = ("--path", model[0] / "checkpoint_last.pt", "--beam", 4, "--cpu", *LANGUAGES)
    text = "the cat's mat, cat"
    printed = run("fairseq-interactive", pairs, *USER_DIR, *path, *words, text=f"{text}\n")
    (expected,) = re.findall(r"^D-0\t\S+\t(.*)$", printed, re.MULTILINE)
    loaded = fairseq_plugins.load(model[0], pairs, **steps)
    assert loaded.translate(text, beam=4) == expected
    assert "cat" in loaded.source.symbols(loaded.source.encode(text))


def test_a_resumed_run_goes_on_with_the_schedule(pairs, model, tmp_path):
    train(pairs, tmp_path, "--max-epoch", 1)
    half = saved_updates(tmp_path)
    train(pairs, tmp_path, "--max-epoch", 2)
    assert saved_updates(tmp_path) == saved_updates(model[0]) == [2 * n for n in half]
    assert half[0] > 5


@pytest.mark.parametrize("precision", ["--bf16", "--memory-efficient-bf16"])
def test_half_precision_keeps_them_on_the_simplex(pairs, tmp_path, precision):
    found = []
    for updates in (2, 6):
        # the second time from where the first ended
        train(pairs, tmp_path, "--max-update", updates, precision)
        found.append(branch_weights(tmp_path))
        assert_on_simplex(*found[-1].values())
        assert saved_updates(tmp_path) == [updates] * 4
    assert not any(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_a_model_that_is_validated_by_translating_is_loaded(pairs, tmp_path):
    best = ("--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric")
    printed = train(pairs, tmp_path, "--max-epoch", 1, "--eval-bleu", *best)
    assert re.search(r"valid on 'valid' subset .*\| bleu [\d.]+", printed)
    path = ("--path", tmp_path / "checkpoint_best.pt", "--cpu", *ALL)
    translated = run("fairseq-generate", pairs, *USER_DIR, *path)
    assert len(re.findall(r"^H-\d+\t", translated, re.MULTILINE)) == 31


def test_gradients_of_the_parts_of_an_epoch_are_those_of_all_of_it(pairs, tmp_path):
    exact = ("--dropout", 0, "--attention-dropout", 0, "--max-update", 3, "--max-tokens", 9000)
    printed = train(pairs, tmp_path / "whole", *exact)
    train(pairs, tmp_path / "parts", *exact, "--batch-size", 100, "--update-freq", 2)
    (sentences,) = map(int, re.findall(r" train en-de (\d+) examples", printed))
    assert 100 < sentences <= 200
    one, two = branch_weights(tmp_path / "whole"), branch_weights(tmp_path / "parts")
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-6, rtol=1e-5)
