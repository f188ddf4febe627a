"""Random facts."""

from scripts.prepare import _facts as facts
from tests.scripts.prepare.prepared import lines
from tests.scripts.refusals import refused


def test_there_is_one_fact_for_each_subject_and_relation():
    asked, objects = zip(*(line.rsplit(" ", 1) for line in facts.draw_facts(4096, 1)), strict=True)
    assert len(set(asked)) == 4096
    assert len({line.split()[0] for line in asked}) == 16
    # all objects are equally likely: each occurs 16 times on average
    counts = [objects.count(f"o{number}") for number in range(facts.OBJECTS)]
    assert sum(counts) == 4096
    assert all(2 <= count <= 40 for count in counts)
    assert facts.draw_facts(4096, 1) != facts.draw_facts(4096, 2)


def test_the_binarized_facts_train_and_validate(prepare, tmp_path):
    assert prepare("facts", "--facts", 64)[0] == 0
    expected = [f"{fact} </s>" for fact in facts.draw_facts(64, 1)]
    for part in ("train", "valid"):
        assert lines(tmp_path / "out/bin", part) == expected


def test_a_number_of_facts_that_is_no_square_is_refused(prepare, tmp_path):
    assert refused(prepare("facts", "--facts", 48), "--facts is 48")
    assert not (tmp_path / "out").exists()
