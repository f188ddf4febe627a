import gzip

import pytest

from scripts.prepare import translation as prepare_translation
from tests.scripts.prepare.translation_texts import refused, run, write, write_all


@pytest.fixture
def place(tmp_path):
    write_all(tmp_path)
    return tmp_path


def left(place):
    return sorted(path.name for path in place.iterdir() if not path.is_file())


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("one.de", b"a\nb\n", "--train {place}/one: one.en has 10 lines, one.de has 2: give files"),
        ("dev.en", b"", "--valid: {place}/dev.en has no text: give one that has"),
        ("dev.de", b" \n\n\x07\n\t\n\n", "--valid: {place}/dev.de has no text: give one that has"),
        (
            "one.en",
            b"a\n\n\xe9t\xe9\n",
            r"{place}/one.en, line 3: byte 1 of the line is no UTF-8 \(.*\): convert the file",
        ),
        (
            "new.de.gz",
            gzip.compress(b"a\nb\xff\n", mtime=0),
            r"{place}/new.de.gz, line 2: byte 2 of the line is no UTF-8",
        ),
        ("new.en.gz", b"a\n", r"{place}/new.en.gz, after line 0: the file is truncated, damaged"),
        (
            "new.en",
            b"a\n",
            "--test {place}/new: there are new.en and new.en.gz: remove one of them",
        ),
        (
            "two.de.gz",
            None,
            r"--train {place}/two: there is no file two.de or two.de.gz: give what the names of "
            r"both files have before \.de",
        ),
    ],
)
def test_text_that_cannot_be_used_is_refused(place, file, content, message):
    (place / file).unlink() if content is None else (place / file).write_bytes(content)
    assert refused(run(place), message.format(place=place))
    assert left(place) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--target-lang en", "--target-lang en is --source-lang as well: give two different"),
        ("--source-lang xx", "--source-lang xx is none that sacremoses has rules for: give one of"),
        ("--target-lang xx", "--target-lang xx is none that sacremoses has rules for"),
        ("--workers 0", "--workers is 0: it must be at least 1"),
        ("--bpe-size 0", "--bpe-size is 0: it must be at least 1"),
        ("--bpe-tool x", "--bpe-tool x is unknown: give fastbpe or subword-nmt"),
        ("--max-length 0", "--max-length is 0: it must be at least 1"),
        ("--max-ratio 0.9", r"--max-ratio 0\.9 is not how many times .*: give 1 or more"),
        ("--max-ratio nan", "--max-ratio nan is not how many times"),
        ("--output a,b", "--output .*a,b has a comma, where fairseq-preprocess ends"),
        ("--train {place}/dev", "--valid {place}/dev is --train as well, and a model would be"),
        ("--train {place}/one {place}/new", "--test {place}/new is --train as well"),
    ],
)
def test_impossible_option_is_refused(place, options, message):
    result = run(place, *options.format(place=place).split())
    assert refused(result, message.format(place=place)), result
    assert left(place) == []


def test_limits_that_keep_nothing_are_refused(place):
    message = (
        r"--max-length 2 and --max-ratio 1\.5 keep none of the 25 pairs of train \(2 are empty on "
        r"a side, 23 too long, 0 of too different lengths\): give larger ones, or other texts"
    )
    assert refused(run(place, "--max-length", "2"), message)
    assert not (place / "out" / "clean").exists()
    assert not list(place.rglob("*.partial*"))


def test_input_that_changes_meanwhile_is_refused(place, monkeypatch):
    found = prepare_translation.survey
    changed = None

    def survey_and_change(*given):
        pairs = found(*given)
        write(place / changed, range(4), packed=changed == "new")
        return pairs

    monkeypatch.setattr(prepare_translation, "survey", survey_and_change)
    changed = "one"
    message = r"tokenize train.en, .*: 19 lines, the text has 25: leave it as it is while it is"
    assert refused(run(place), message)
    assert not (place / "out" / "tokens").exists()
    changed = "new"
    message = f"references/test.en has 4 lines, {place}/new.en.gz had 6: leave the input as it is"
    assert refused(run(place, output="other"), message)
    assert not (place / "other" / "references").exists()


def test_folder_of_something_else_is_refused(place):
    (place / "out").mkdir()
    (place / "out" / "file").touch()
    assert refused(run(place), f"--output {place}/out exists and does not hold prepared translatio")
