"""Corpora that are drawn: random facts, and number names."""

import re
from itertools import chain, combinations, islice

import pytest
from num2words import num2words

from scripts.prepare import _generated as generated
from scripts.prepare._lines import read_lines
from tests.scripts.prepare.prepared import SPLITS, contents, lines
from tests.scripts.refusals import refused

PAIRS = dict(zip(SPLITS, (300, 20, 40), strict=True))


def test_facts_has_one_for_each_subject_and_relation_in_training_and_validation(prepare, tmp_path):
    drawn = generated.draw_facts(4096, 1)
    asked, objects = zip(*(line.rsplit(" ", 1) for line in drawn), strict=True)
    assert len(set(asked)) == 4096
    assert len({line.split()[0] for line in asked}) == 16
    # all objects are equally likely: each occurs 16 times on average
    counts = [objects.count(f"o{number}") for number in range(generated.OBJECTS)]
    assert sum(counts) == 4096
    assert all(2 <= count <= 40 for count in counts)
    assert drawn != generated.draw_facts(4096, 2)
    assert refused(prepare("facts", "--facts", 48), "--facts is 48")
    assert prepare("facts", "--facts", 64)[0] == 0
    expected = [f"{fact} </s>" for fact in generated.draw_facts(64, 1)]
    for part in ("train", "valid"):
        assert lines(tmp_path / "out/bin", part) == expected


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


@pytest.fixture
def number_pairs(prepare, tmp_path):
    """Return a function that prepares number names in a folder."""
    few = [word for part, count in PAIRS.items() for word in (f"--{part}", count)]

    def make(name, *options):
        assert prepare("number_names", *few, *options, "--output", tmp_path / name)[0] == 0
        return tmp_path / name

    return make


def test_number_names_are_the_same_on_both_sides_and_others_in_each_part(number_pairs):
    folder, seen = number_pairs("made"), {}
    drawn = {part: set(islice(generated.numbers(part, 1), 3000)) for part in SPLITS}
    named = {num2words(number): number for numbers in drawn.values() for number in numbers}
    for part, count in PAIRS.items():
        sides = (read_lines(folder / f"text/{part}.{language}") for language in ("en", "de"))
        pairs = list(zip(*sides, strict=True))
        assert len(set(pairs)) == len(pairs) == count
        numbers = [read_numbers(*pair, named) for pair in pairs]
        assert all(small < large for small, large in numbers)
        seen[part] = set(chain.from_iterable(numbers))
        assert seen[part] <= drawn[part]
    for one, other in combinations(SPLITS, 2):
        assert not seen[one] & seen[other]
    assert {len(str(number)) for number in seen["train"]} == set(range(1, 7))
    # the same seed makes the same bytes
    made, other = contents(folder), contents(number_pairs("other", "--seed", 2))
    assert contents(number_pairs("same")) == made
    assert all(other[name] != content for name, content in made.items())
