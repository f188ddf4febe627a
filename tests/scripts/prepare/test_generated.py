"""Number names and facts."""

import re
from itertools import chain, combinations, islice

import pytest
from num2words import num2words

from scripts.prepare import _generated as generated
from scripts.prepare.__main__ import main
from scripts.prepare._lines import read_lines
from tests.scripts.prepare.prepared import SPLITS, contents, lines
from tests.scripts.refusals import refused

FEW = "--train 300 --valid 20 --test 40".split()


def run(folder, *options):
    return main(["number_names", "--output", str(folder), *FEW, *options])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "out"
    assert run(folder) == 0
    return folder


def read_numbers(english, german, named):
    """Return the two numbers that both sides of a pair name, the smaller first."""
    for patterns in generated.SENTENCES:
        slots = {"small": "(?P<small>.+)", "large": "(?P<large>.+)"}
        if match := re.fullmatch(patterns[0].format(**slots), english):
            numbers = {slot: named[text] for slot, text in match.groupdict().items()}
            names = {slot: num2words(number, lang="de") for slot, number in numbers.items()}
            assert german == patterns[1].format(**names)
            return numbers["small"], numbers["large"]
    raise AssertionError(english)


def test_sides_name_the_same_numbers_and_no_part_those_of_another(made):
    drawn = {part: set(islice(generated.numbers(part, 1), 3000)) for part in SPLITS}
    named = {num2words(number): number for numbers in drawn.values() for number in numbers}
    seen = {}
    for part, count in (("train", 300), ("valid", 20), ("test", 40)):
        sides = (read_lines(made / "text" / f"{part}.{language}") for language in ("en", "de"))
        pairs = list(zip(*sides, strict=True))
        assert len(set(pairs)) == len(pairs) == count
        numbers = [read_numbers(*pair, named) for pair in pairs]
        assert all(small < large for small, large in numbers)
        seen[part] = set(chain.from_iterable(numbers))
        assert seen[part] <= drawn[part]
    for one, other in combinations(SPLITS, 2):
        assert not seen[one] & seen[other]
    assert {len(str(number)) for number in seen["train"]} == set(range(1, 7))


def test_the_same_seed_makes_the_same_bytes(made, tmp_path):
    assert run(tmp_path / "same") == 0
    assert contents(tmp_path / "same") == contents(made)
    assert run(tmp_path / "other", "--seed", "2") == 0
    other = contents(tmp_path / "other")
    assert all(other[name] != content for name, content in contents(made).items())


def test_there_is_one_fact_for_each_subject_and_relation():
    asked, objects = zip(
        *(line.rsplit(" ", 1) for line in generated.draw_facts(4096, 1)), strict=True
    )
    assert len(set(asked)) == 4096
    assert len({line.split()[0] for line in asked}) == 16
    # all objects are equally likely: each occurs 16 times on average
    counts = [objects.count(f"o{number}") for number in range(generated.OBJECTS)]
    assert sum(counts) == 4096
    assert all(2 <= count <= 40 for count in counts)
    assert generated.draw_facts(4096, 1) != generated.draw_facts(4096, 2)


def test_the_binarized_facts_train_and_validate(prepare, tmp_path):
    assert prepare("facts", "--facts", 64)[0] == 0
    expected = [f"{fact} </s>" for fact in generated.draw_facts(64, 1)]
    for part in ("train", "valid"):
        assert lines(tmp_path / "out/bin", part) == expected


def test_a_number_of_facts_that_is_no_square_is_refused(prepare, tmp_path):
    assert refused(prepare("facts", "--facts", 48), "--facts is 48")
    assert not (tmp_path / "out").exists()
