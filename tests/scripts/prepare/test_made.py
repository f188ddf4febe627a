"""Facts and number names, which are generated."""

import re
from itertools import combinations, islice

import pytest
from num2words import num2words

from scripts.prepare import facts, number_names
from scripts.prepare._lines import read_lines
from tests.scripts.prepare.prepared import SPLITS, contents, lines, refused

FEW = "--train 300 --valid 20 --test 40".split()


def run(folder, *options):
    return number_names.main(["--output", str(folder), *FEW, *options])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "out"
    assert run(folder) == 0
    return folder


def pairs(folder, part):
    files = [folder / "text" / f"{part}.{language}" for language in ("en", "de")]
    return list(zip(*(read_lines(file) for file in files), strict=True))


def numbers_of(pair):
    """Return the names of numbers in both sides of a pair, found by its sentence pattern."""
    for patterns in number_names.SENTENCES:
        found = [
            re.fullmatch(pattern.format(small="(?P<small>.+)", large="(?P<large>.+)"), line)
            for pattern, line in zip(patterns, pair, strict=True)
        ]
        if all(found):
            return [match.groupdict() for match in found]
    raise AssertionError(pair)


def test_sides_name_the_same_numbers_and_no_part_another_part_s(made):
    drawn = {part: set(islice(number_names.numbers(part, 1), 3000)) for part in SPLITS}
    named = {num2words(number): number for numbers in drawn.values() for number in numbers}
    seen = {}
    for part, count in (("train", 300), ("valid", 20), ("test", 40)):
        found = pairs(made, part)
        assert len(set(found)) == len(found) == count
        seen[part] = set()
        for pair in found:
            english, german = numbers_of(pair)
            values = {slot: named[text] for slot, text in english.items()}
            assert values["small"] < values["large"]
            assert german == {slot: num2words(number, lang="de") for slot, number in values.items()}
            seen[part] |= set(values.values())
        assert seen[part] <= drawn[part]
    for one, other in combinations(SPLITS, 2):
        assert not seen[one] & seen[other]
    assert {len(str(number)) for number in seen["train"]} == set(range(1, 7))


def test_numbers_belong_to_one_part():
    parts = [number_names.part_of(number, 1) for number in range(4000)]
    assert {part: parts.count(part) // 100 for part in SPLITS} == pytest.approx(
        {"train": 36, "valid": 2, "test": 2}, abs=1
    )
    assert parts != [number_names.part_of(number, 2) for number in range(4000)]
    drawn = list(islice(number_names.numbers("train", 1), 6000))
    for digits in range(1, 7):
        count = sum(10 ** (digits - 1) <= number < 10**digits for number in drawn)
        assert 850 < count < 1150


def test_same_seed_makes_the_same_bytes(made, tmp_path):
    assert run(tmp_path / "same") == 0
    assert contents(tmp_path / "same") == contents(made)
    assert run(tmp_path / "other", "--seed", "2") == 0
    other = contents(tmp_path / "other")
    assert all(other[name] != content for name, content in contents(made).items())


def test_there_is_one_fact_for_each_subject_and_relation():
    asked, objects = zip(*(line.rsplit(" ", 1) for line in facts.draw_facts(4096, 1)), strict=True)
    assert len(set(asked)) == 4096
    assert len({line.split()[0] for line in asked}) == 16
    # all objects are equally likely: each occurs 16 times on average
    counts = [objects.count(f"o{number}") for number in range(facts.OBJECTS)]
    assert sum(counts) == 4096
    assert all(2 <= count <= 40 for count in counts)
    assert facts.draw_facts(4096, 1) != facts.draw_facts(4096, 2)


def test_the_binarized_facts_train_and_validate(call, tmp_path):
    words = ("--facts", 64, "--output", tmp_path / "data")
    assert call(facts.main, *words)[0] == 0
    expected = [f"{fact} </s>" for fact in facts.draw_facts(64, 1)]
    for part in ("train", "valid"):
        assert lines(tmp_path / "data/bin", part) == expected
    status, printed, _ = call(facts.main, *words)
    assert (status, printed.count(": complete\n")) == (0, 2)


@pytest.mark.parametrize(
    ("module", "option", "value", "remedy"),
    [
        (facts, "--facts", 0, "give 16 times a square number"),
        (facts, "--facts", 48, "give 16 times a square number"),
        (number_names, "--test", 0, "it must be at least 1"),
    ],
)
def test_impossible_numbers_are_refused(call, tmp_path, module, option, value, remedy):
    result = call(module.main, "--output", tmp_path / "data", option, value)
    assert refused(result, f"{option} is {value}: {remedy}")
    assert not (tmp_path / "data").exists()
