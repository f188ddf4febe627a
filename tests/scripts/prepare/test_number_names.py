import re
from itertools import islice

import pytest
from num2words import num2words

from scripts.prepare import number_names
from tests.scripts.prepare.prepared import SPLITS, contents, refused

FEW = "--train 300 --valid 20 --test 40".split()


def run(folder, *options):
    return number_names.main(["--output", str(folder), *FEW, *options])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "out"
    assert run(folder) == 0
    return folder


def pairs(folder, part):
    files = [
        (folder / "text" / f"{part}.{one}").read_text(encoding="utf-8") for one in ("en", "de")
    ]
    return list(zip(*(text.split("\n")[:-1] for text in files), strict=True))


def numbers_of(pair):
    """Numbers whose names make both sides of a pair, as found by its own frame."""
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
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["valid"]
    assert not seen["valid"] & seen["test"]
    lengths = [len(str(number)) for number in seen["train"]]
    assert {*lengths} == set(range(1, 7))


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


def test_names_and_order_of_both_languages(made):
    assert number_names.name(21_305, "de") == "einundzwanzigtausenddreihundertfünf"
    assert number_names.name(21_305, "en") == "twenty-one thousand, three hundred and five"
    text = "\n".join(" | ".join(pair) for pair in pairs(made, "train"))
    assert re.search(r"comes before .* \| vor .* kommt ", text)


def test_a_part_without_sentences_is_refused(call, tmp_path):
    result = call(number_names.main, "--output", tmp_path / "out", *FEW, "--test", "0")
    assert refused(result, "--test is 0: it must be at least 1")
    assert not (tmp_path / "out").exists()
