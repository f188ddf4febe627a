import re
import signal
import sys
from itertools import islice

import pytest
from num2words import num2words

from scripts.prepare import number_names

SPLITS = ("train", "valid", "test")
FEW = "--train 300 --valid 20 --test 40".split()


def run(folder, *options):
    with pytest.MonkeyPatch.context() as patch:
        words = ["number_names.py", "--output", folder, *FEW, *options]
        patch.setattr(sys, "argv", list(map(str, words)))
        return number_names.main()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "out"
    assert run(folder) == 0
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def pairs(folder, part):
    files = [(folder / f"{part}.{one}").read_text(encoding="utf-8") for one in ("en", "de")]
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


def test_german_has_another_order_within_numbers_and_sentences(made):
    text = "\n".join(" | ".join(pair) for pair in pairs(made, "train"))
    assert number_names.name(21_305, "de") == "einundzwanzigtausenddreihundertfünf"
    assert number_names.name(21_305, "en") == "twenty-one thousand, three hundred and five"
    assert re.search(r"comes before .* \| vor .* kommt ", text)
    # BLEU counts sequences of four words
    for part in SPLITS:
        assert all(len(german.split()) >= 4 for _, german in pairs(made, part))


def test_second_run_does_nothing(made, capsys):
    before = contents(made)
    assert run(made) == 0
    assert capsys.readouterr().out == f"{made} is complete, nothing to do\n"
    assert contents(made) == before


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_stopped_run_leaves_nothing(tmp_path, monkeypatch, capsys, stop):
    sentences = number_names.sentences

    def stop_late(part, count, seed):
        for number, pair in enumerate(sentences(part, count, seed)):
            yield pair
            if part == "valid" and number == 9:
                if stop is KeyboardInterrupt:
                    signal.raise_signal(signal.SIGINT)
                raise stop

    monkeypatch.setattr(number_names, "sentences", stop_late)
    status = run(tmp_path / "out")
    error = capsys.readouterr().err
    if stop is KeyboardInterrupt:
        expected = (130, "\ninterrupted; nothing is left, run the same command again\n")
        assert (status, error) == expected
    else:
        assert status == 1
        assert error.startswith(f"error: --output {tmp_path}/out: [Errno 28] No space left on")
    assert list(tmp_path.iterdir()) == []


def test_impossible_requests_are_refused(made, tmp_path, capsys, monkeypatch):
    def refused(message, *options, output=tmp_path / "out"):
        status = run(output, *options)
        return status == 1 and re.match(f"error: {message}", capsys.readouterr().err)

    for part in SPLITS:
        message = f"--{part} is 0: it must be at least 1"
        assert refused(message, f"--{part}", "0")
    monkeypatch.setattr(number_names, "PATIENCE", 50)
    monkeypatch.setattr(number_names, "DIGITS", 1)
    message = r"--train 9999: there are hardly more than \d+ sentences: give less"
    assert refused(message, "--train", "9999")
    assert list(tmp_path.iterdir()) == []
    message = rf"--output {made} was prepared with another --seed \(1, now 3\): remove it or give"
    assert refused(message, "--seed", "3", output=made)
    (tmp_path / "out").mkdir()
    message = f"--output {tmp_path}/out exists and does not hold number names: remove it or give"
    assert refused(message)
