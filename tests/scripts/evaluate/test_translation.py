"""Evaluation scores the whole split in its order, and scores match their definitions."""

import json
import math
import re
import signal
from functools import partial

import numpy as np
import pytest
import torch
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from scripts.evaluate import _translation_scores as translation_scores
from scripts.evaluate import translation as evaluate_translation

SOURCES = ("a quick &amp; dirty fox", "two", "the third")
# only a newline ends a line
TOKENS = ("ein schneller &amp; hell @-@ grauer Fuchs .", "zwei\u2028\x85oder\rdrei\x0b", "")
TEXTS = ("ein schneller & hell-grauer Fuchs.", "zwei oder drei", "")
REFERENCES = ("ein schneller & hell-grauer Fuchs.", "drei", "der Dritte")


@pytest.fixture
def root(tmp_path):
    """Write a prepared test split of 3 sentences, and checkpoints; return the folder."""
    for folder in ("bin", "references"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    for name in ("test.en-de.en", "test.en-de.de", "valid.en-de.en"):
        path = tmp_path / "data" / "bin" / name
        builder = MMapIndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
        for _ in REFERENCES:
            builder.add_item(torch.tensor([4, 2]))
        builder.finalize(f"{path}.idx")
    write(tmp_path / "data" / "references" / "test.de", REFERENCES)
    for name, weight in (("plain", "alpha"), ("branched", "kappa"), ("softmax", "kappa_logits")):
        torch.save({"model": {f"decoder.weights.{weight}": torch.ones(1)}}, tmp_path / f"{name}.pt")
    return tmp_path


def write(path, lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def results(numbers=(2, 0, 1)):
    """Return the lines that fairseq-generate writes for some of the sentences."""
    lines = ["2024-01-01 00:00:00 | INFO | fairseq_cli.generate | H-0 and so on"]
    for number in numbers:
        lines += [f"S-{number}\t{SOURCES[number]}", f"T-{number}\tx"]
        lines += [f"H-{number}\t-0.25\t{TOKENS[number]}", f"D-{number}\t-0.25\tx"]
        # with --nbest 2
        lines += [f"P-{number}\t-0.1 -0.2", f"H-{number}\t-0.5\tanderes"]
    return [*lines, "Generate test with beam=4: BLEU4 = 1.00"]


@pytest.fixture
def run(root, monkeypatch):
    """Run the script with a stand-in for fairseq-generate; return status and the commands."""

    def run_script(*words, lines=None, stop=None, path="plain.pt"):
        ran = []

        def generate(command):
            ran.append(command)
            if stop:
                stop()
            folder, split = value(command, "--results-path"), value(command, "--gen-subset")
            with open(f"{folder}/generate-{split}.txt", "w", encoding="utf-8") as file:
                file.write("\n".join(results() if lines is None else lines) + "\n")

        monkeypatch.setattr(evaluate_translation, "run_child", generate)
        line = [root / "data" / "bin", "--path", root / path, "--source-lang", "en"]
        line += ["--target-lang", "de", "--output", root / "out", *words]
        return evaluate_translation.main(list(map(str, line))), ran

    return run_script


def contents(root):
    return {path.name: path.read_text(encoding="utf-8") for path in (root / "out").iterdir()}


def value(command, option):
    """Return the value that fairseq uses for an option: the last one given."""
    return command[len(command) - command[::-1].index(option)]


def test_translations_are_written_as_text_in_order(root, run, capsys):
    status, (command,) = run("--examples", 2)
    assert status == 0
    written = contents(root)
    assert sorted(written) == ["scores.json", "translation.txt"]
    assert written["translation.txt"].splitlines() == list(TEXTS)
    printed = capsys.readouterr().out
    assert "source:      a quick & dirty fox\ntranslation: ein schneller & hell-grauer" in printed
    assert "source:      two\ntranslation: zwei oder drei\nreference:   drei\n" in printed
    assert "the third" not in printed
    scores = json.loads(written["scores.json"])
    expected = translation_scores.score(list(TEXTS), list(REFERENCES), "de")
    assert {key: scores[key] for key in expected} == expected
    assert (scores["sentences"], scores["exact"]) == (3, pytest.approx(100 / 3))
    assert scores["detokenized"]["signature"] in printed
    for number in (scores["detokenized"]["score"], scores["tokenized"]["score"]):
        assert f" {number:.2f} |" in printed
    # the recorded command can be run again: it lacks the temporary folder
    assert scores["command"].split() == command[: command.index("--results-path")]


def test_fairseq_gets_the_options_but_translates_all(root, run):
    write(root / "mine.txt", TEXTS)
    ensemble = f"{root}/plain.pt:{root}/branched.pt"
    status, (command,) = run(
        *("--path", ensemble, "--reference", root / "mine.txt"),
        *("--beam", 2, "--lenpen", 1.5, "--cpu", "--"),
        *("--required-batch-size-multiple", 8, "--gen-subset", "valid", "--seed", 7),
        *("--beam", 3, "--model-overrides", "{}"),
    )
    assert status == 0
    expected = {"--required-batch-size-multiple": "1", "--gen-subset": "test", "--path": ensemble}
    expected |= {"--seed": "7", "--beam": "3", "--lenpen": "1.5", "--model-overrides": "{}"}
    assert {option: value(command, option) for option in expected} == expected
    assert "--cpu" in command
    scores = json.loads(contents(root)["scores.json"])
    assert (scores["exact"], scores["reference"]) == (100, str(root / "mine.txt"))
    for path in ("branched.pt", "softmax.pt"):
        status, (command,) = run("--branch-weights", "uniform", path=path)
        assert status == 0
        assert value(command, "--model-overrides") == "{'branch_weights': 'uniform'}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--branch-weights random", "--branch-weights is random, and --path {root}/plain.pt"),
        ("--branch-weights random -- --model-overrides={{}}", "--branch-weights is random and "),
        ("--split valid", "--reference: there is no {root}/data/references/valid.de"),
        ("--reference {root}/two.txt", "--reference {root}/two.txt has 2 lines, --split test"),
        ("--reference {root}/tokens.txt", "{root}/tokens.txt is tokenized: give the raw text"),
        ("--output {root}/two.txt", "--output {root}/two.txt: "),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(root, run, capsys, words, message):
    write(root / "two.txt", REFERENCES[:2])
    write(root / "tokens.txt", ["Ja , sagte sie .", "zwei .", "Die dritte ist da !"])
    status, ran = run(*words.format(root=root).split())
    assert (status, ran) == (1, [])
    assert re.match(f"error: {message.format(root=root)}", capsys.readouterr().err)
    assert not (root / "out").exists()


def test_evaluation_that_stops_keeps_earlier_results(root, run, capsys):
    interrupt = partial(signal.raise_signal, signal.SIGINT)
    assert run(stop=interrupt)[0] == 130
    assert "interrupted; nothing is written, run the same command again" in capsys.readouterr().err
    assert not (root / "out").exists()
    run()
    before = contents(root)
    assert run(stop=interrupt)[0] == 130
    assert run("--reference", root / "plain.pt")[0] == 1
    # an incomplete translation is not scored
    for numbers in ((2, 0), ()):
        capsys.readouterr()
        assert run(lines=results(numbers))[0] == 1
        message = f"error: fairseq-generate gave {len(numbers)} translations of the 3 sentences of"
        assert capsys.readouterr().err.startswith(message)
    assert contents(root) == before


def test_scores_for_right_and_for_empty_translations():
    lines = ["Der Hund, der 3 Eis-Becher frisst,  ist groß.", "„Ja“, sagte sie - leise."]
    # exact matches ignore only whitespace; tokens also ignore the kind of quotation marks
    for translations, detokenized, tokenized, exact in (
        ([" ".join(line.split()) for line in lines], 100, 100, 100),
        ([lines[0], lines[1].replace("„Ja“", '"Ja"')], None, 100, 50),
        (["", ""], 0, 0, 0),
    ):
        scores = translation_scores.score(translations, lines, "de")
        assert detokenized is None or scores["detokenized"]["score"] == pytest.approx(detokenized)
        assert scores["tokenized"]["score"] == pytest.approx(tokenized)
        assert scores["exact"] == exact


def test_bleu_of_texts_and_of_moses_tokens_equals_its_formula():
    translations = ["Die Welt-Karte des Hauses ist alt.", "Er geht dort hin."]
    references = ["Die Welt-Karte eines Hauses ist alt.", "Er geht nicht dort hin."]
    # BLEU = 100 min(1, exp(1 - r / c)) (p_1 p_2 p_3 p_4)^(1/4): c and r are the numbers of tokens
    # of both sides, and of the n-grams of the translations, the share p_n is in their references.
    # With the compound whole, the sentences have 7 and 5 tokens, and the references 7 and 6:
    whole = 100 * math.exp(1 - 13 / 12) * (11 / 12 * 7 / 10 * 3 / 8 * 1 / 6) ** (1 / 4)
    # with the compound as three tokens, 9 and 5, and 9 and 6
    split = 100 * math.exp(1 - 15 / 14) * (13 / 14 * 9 / 12 * 5 / 10 * 2 / 8) ** (1 / 4)
    for language, expected in {"de": split, "fr": whole}.items():
        scores = translation_scores.score(translations, references, language)
        assert scores["detokenized"]["score"] == pytest.approx(whole)
        assert scores["tokenized"]["score"] == pytest.approx(expected)
        assert scores["tokenized"]["compounds_split"] is (language == "de")
    assert re.search(r"tok:13a\|smooth:exp\|version:", scores["detokenized"]["signature"])
    assert re.search(r"tok:none\|smooth:none", scores["tokenized"]["signature"])


def test_compounds_are_split_as_perl_does_it():
    # the second - has no character left before it
    assert translation_scores.tokens_to_score(["a-b-c"], "de") == ["a ##AT##-##AT## b-c"]
