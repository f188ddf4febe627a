import json
import sys

import pytest
from fairseq.data import Dictionary, data_utils

from scripts.prepare import _binarize, facts
from tests.scripts.prepare.preprocess_in_process import in_this_process


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(_binarize, "child_process", in_this_process)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["facts.py", *map(str, words)])
        return facts.main()

    return run


def test_there_is_one_fact_for_each_subject_and_relation():
    asked, objects = zip(*(line.rsplit(" ", 1) for line in facts.draw_facts(4096, 1)), strict=True)
    assert len(set(asked)) == 4096
    assert len({line.split()[0] for line in asked}) == 16
    # each object is as likely as another: 16 times on average
    counts = [objects.count(f"o{number}") for number in range(facts.OBJECTS)]
    assert sum(counts) == 4096
    assert all(2 <= count <= 40 for count in counts)
    assert facts.draw_facts(4096, 1) != facts.draw_facts(4096, 2)


def test_the_binarized_facts_train_and_validate(run, tmp_path, capsys):
    assert run("--facts", 64, "--output", tmp_path / "data") == 0
    dictionary = Dictionary.load(str(tmp_path / "data/bin/dict.txt"))
    expected = (tmp_path / "data/facts.txt").read_text(encoding="utf-8").splitlines()
    for part in ("train", "valid"):
        path = str(tmp_path / "data/bin" / part)
        lines = data_utils.load_indexed_dataset(path, dictionary)
        assert [dictionary.string(lines[number]) for number in range(64)] == expected
    made = json.loads((tmp_path / "data/corpus.json").read_text(encoding="utf-8"))
    assert made == {"data_set": "facts", "facts": 64, "seed": 1}
    capsys.readouterr()
    assert run("--facts", 64, "--output", tmp_path / "data") == 0
    assert "is complete, nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("number", [-16, 0, 15, 48, 4097])
def test_numbers_that_make_no_square_are_refused(run, tmp_path, capsys, number):
    assert run("--facts", number, "--output", tmp_path / "data") == 1
    remedy = "give 16 times a square number, such as 4096, 16384 or 65536"
    assert f"error: --facts is {number}: {remedy}" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()
