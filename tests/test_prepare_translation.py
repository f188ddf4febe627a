import contextlib
import gzip
import io
import json
import re
import shutil
import signal
import sys

import pytest
from fairseq.data import Dictionary, data_utils
from sacremoses import MosesDetokenizer

import bitext
import parallel_lines
import prepare_translation
import preprocess_command
import run_command
import subword_units
from tests.preprocess_in_process import in_this_process

LANGUAGES = ("en", "de")
# Pairs that are not to be trained on, by what is wrong with them.
EMPTY, LONG, UNEQUAL = (3, 4), (5, 16), (7, 18)
OPTIONS = "--bpe-size 120 --max-length 40 --workers 1".split()
STEPS = [
    *("inputs.json", "references"),
    *(f"tokens/{part}.{one}" for part in ("train", "valid", "test", "test1") for one in LANGUAGES),
    "bpe/codes",
    *(f"bpe/{part}.{one}" for part in ("train", "valid", "test", "test1") for one in LANGUAGES),
    *("clean", "bin"),
]


def sentence(number, language):
    """Sentences of pair NUMBER have x...x in both languages, as one word."""
    named = f"x{number:03}x"
    plain = {
        "en": f"The {named} well-known cat sat, isn't it?",
        "de": f"Die {named} wohl-bekannte Katze saß, nicht wahr?",
    }
    if number in LONG:
        return " ".join([plain[language]] * 5)
    if number in UNEQUAL and (language == "en") == (number == UNEQUAL[0]):
        return f"{plain[language]} {plain[language]}"
    return {(EMPTY[0], "en"): "", (EMPTY[1], "de"): "\x07 "}.get(
        (number, language), plain[language]
    )


def write(prefix, numbers, packed=False):
    for language in LANGUAGES:
        content = "".join(f"{sentence(number, language)}\n" for number in numbers).encode()
        path = prefix.with_name(f"{prefix.name}.{language}{'.gz' * packed}")
        path.write_bytes(gzip.compress(content) if packed else content)


def run(place, *options, output="out"):
    """Status, stdout and stderr of the script for the texts of a folder."""
    words = ["prepare_translation.py", "--source-lang", "en", "--target-lang", "de"]
    words += ["--train", place / "one", place / "two", "--valid", place / "dev"]
    words += ["--test", place / "new", place / "dev", "--output", place / output, *OPTIONS]
    streams = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(streams[0]),
        contextlib.redirect_stderr(streams[1]),
    ):
        patch.setattr(sys, "argv", [str(word) for word in (*words, *options)])
        if preprocess_command.child_process is run_command.child_process:
            patch.setattr(preprocess_command, "child_process", in_this_process)
        status = prepare_translation.main()
    return status, *(stream.getvalue() for stream in streams)


def write_all(folder):
    write(folder / "one", range(10))
    write(folder / "two", range(10, 25), packed=True)
    # some of the same kinds of pairs
    write(folder / "dev", (3, 5, 7, 30, 31))
    write(folder / "new", (4, 16, 18, 40, 41, 42), packed=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_all(folder)
    status, _, error = run(folder)
    assert (status, error) == (0, "")
    return folder


@pytest.fixture
def place(tmp_path, whole):
    for path in whole.iterdir():
        if path.is_file():
            # with its time of modification
            shutil.copy2(path, tmp_path)
    return tmp_path


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def pairs_of(folder, part):
    return list(zip(*(lines(folder / f"{part}.{one}") for one in LANGUAGES), strict=True))


def joined(line):
    return line.replace("@@ ", "")


def number_of(line):
    (number,) = set(re.findall(r"x(\d{3})x", joined(line)))
    return int(number)


def description(output):
    return json.loads((output / "preparation.json").read_text(encoding="utf-8"))


def contents(folder):
    """Bytes of all files but the records, which hold times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("steps.json", "preprocess.log")
    }


def refused(result, message):
    status, _, error = result
    return status == 1 and re.match(f"error: {message}", error) and error.count("\n") == 1


def binarized(output, part):
    """Sentences of a part of bin as units, by pair."""
    found = []
    for one in LANGUAGES:
        dictionary = Dictionary.load(str(output / "bin" / f"dict.{one}.txt"))
        data = data_utils.load_indexed_dataset(
            str(output / "bin" / f"{part}.en-de.{one}"), dictionary
        )
        found.append([dictionary.string(data[item]) for item in range(len(data))])
        assert all(data[item][-1] == dictionary.eos() for item in range(len(data)))
    return list(zip(*found, strict=True))


def test_pairs_stay_together_through_every_step(whole):
    out = whole / "out"
    parts = {"train": range(25), "valid": (3, 5, 7, 30, 31), "test": (4, 16, 18, 40, 41, 42)}
    parts["test1"] = parts["valid"]
    bad = {*EMPTY, *LONG, *UNEQUAL}
    for part, numbers in parts.items():
        for folder in ("tokens", "bpe"):
            found = pairs_of(out / folder, part)
            assert len(found) == len(numbers)
            for number, pair in zip(numbers, found, strict=True):
                assert [number_of(line) for line in pair if line] == [number] * (2 - pair.count(""))
        tokens, units = pairs_of(out / "tokens", part), pairs_of(out / "bpe", part)
        assert [tuple(map(joined, pair)) for pair in units] == tokens
        kept = units
        if part in ("train", "valid"):
            kept = pairs_of(out / "clean", part)
            expected = [number for number in numbers if number not in bad]
            assert [tuple(map(number_of, pair)) for pair in kept] == [
                (number, number) for number in expected
            ]
            assert set(kept) <= set(units)
        assert all(
            unit == found or "<unk>" in found
            for given, pair in zip(kept, binarized(out, part), strict=True)
            for unit, found in zip(given, pair, strict=True)
        )


def test_cleaning_removes_by_units(whole):
    out = whole / "out"
    for part in ("train", "valid"):
        kept = []
        for pair in pairs_of(out / "bpe", part):
            short, long = sorted(len(line.split()) for line in pair)
            if 1 <= short and long <= 40 and long * 2 <= short * 3:
                kept.append(pair)
        assert pairs_of(out / "clean", part) == kept
    found = description(out)["parts"]
    reasons = [found["train"][key] for key in ("pairs", "kept", "empty", "too_long", "too_unequal")]
    assert reasons == [25, 19, 2, 2, 2]
    assert [found["valid"][key] for key in ("kept", "empty", "too_long", "too_unequal")] == [
        *(2, 1, 1, 1)
    ]
    assert (found["test"]["kept"], found["test1"]["kept"]) == (6, 5)


def test_test_parts_are_left_whole_and_their_text_comes_back(whole):
    out = whole / "out"
    for part, source in (("test", "new"), ("test1", "dev")):
        for one in LANGUAGES:
            copy = out / "references" / f"{part}.{one}"
            packed = whole / f"{source}.{one}.gz"
            raw = (
                gzip.decompress(packed.read_bytes())
                if packed.exists()
                else (whole / f"{source}.{one}").read_bytes()
            )
            assert copy.read_bytes() == raw
            detokenizer = MosesDetokenizer(lang=one)
            units = lines(out / "bpe" / f"{part}.{one}")
            back = [detokenizer.detokenize(joined(line).split()) for line in units]
            assert back == [line.strip("\x07 ") for line in lines(copy)]
    assert sorted(path.name for path in (out / "references").iterdir()) == [
        f"{part}.{one}" for part in ("test", "test1") for one in sorted(LANGUAGES)
    ]


def test_codes_are_those_of_both_sides_of_training_only(whole, tmp_path):
    out = whole / "out"
    sources = [out / "tokens" / f"train.{one}" for one in LANGUAGES]
    subword_units.learn(sources, tmp_path / "codes", 120)
    assert (tmp_path / "codes").read_bytes() == (out / "bpe" / "codes").read_bytes()
    subword_units.learn(sources[:1], tmp_path / "codes", 120)
    assert (tmp_path / "codes").read_bytes() != (out / "bpe" / "codes").read_bytes()
    joint = (out / "bin" / "dict.en.txt").read_bytes()
    assert joint == (out / "bin" / "dict.de.txt").read_bytes()
    words = {line.split()[0] for line in joint.decode().splitlines()}
    units = " ".join(line for pair in pairs_of(out / "clean", "train") for line in pair)
    assert words == set(units.split())


def test_sizes_are_those_of_the_texts(whole):
    out = whole / "out"
    found = description(out)
    dictionary = Dictionary.load(str(out / "bin" / "dict.en.txt"))
    assert found["symbols"] == len(dictionary) - dictionary.nspecial
    assert (found["source-lang"], found["target-lang"], found["max-ratio"]) == ("en", "de", 1.5)
    for part, sizes in found["parts"].items():
        held = binarized(out, part)
        assert sizes["kept"] == len(held)
        for side, one in enumerate(LANGUAGES):
            units = [pair[side].split() for pair in held]
            assert sizes[one] == {
                "words": sum(len(pair[side].split()) for pair in pairs_of(out / "tokens", part)),
                "units": sum(len(pair[side].split()) for pair in pairs_of(out / "bpe", part)),
                "tokens": sum(map(len, units)) + len(units),
                "unknown_units": sum(line.count("<unk>") for line in units),
            }
    assert json.loads((out / "inputs.json").read_text()) == {
        "train": {"one": 10, "two": 15},
        "valid": {"dev": 5},
        "test": {"new": 6},
        "test1": {"dev": 5},
    }


def test_separate_dictionaries_and_whole_hyphens_on_request(place):
    options = ("--separate-dictionaries", "--no-aggressive-hyphens", "--bpe-tool", "subword-nmt")
    assert run(place, *options)[0] == 0
    out = place / "out"
    for one in LANGUAGES:
        text = (out / "clean" / f"train.{one}").read_text(encoding="utf-8")
        words = {line.split()[0] for line in lines(out / "bin" / f"dict.{one}.txt")}
        assert words == set(text.split())
        assert description(out)["symbols"][one] == len(words)
    assert "well-known" in joined((out / "bpe" / "train.en").read_text(encoding="utf-8"))
    assert tuple(map(joined, binarized(out, "train")[0])) == pairs_of(out / "tokens", "train")[0]


def test_processes_make_the_same(place, whole, monkeypatch):
    monkeypatch.setattr(parallel_lines, "CHUNK", 4)
    # fairseq-preprocess itself has its own tests with several
    binarize = prepare_translation.binarize
    monkeypatch.setattr(
        prepare_translation, "binarize", lambda *given: binarize(*given[:4], 1, *given[5:])
    )
    assert run(place, "--workers", "2")[0] == 0
    assert contents(place / "out") == contents(whole / "out")


def stop_at(monkeypatch, step, stop):
    """Let a step stop at its end."""
    run_step = prepare_translation.Steps.run

    def run_and_stop(steps, name, options, sources, work):
        def work_and_stop(target):
            work(target)
            stop()

        return run_step(steps, name, options, sources, work_and_stop if name == step else work)

    monkeypatch.setattr(prepare_translation.Steps, "run", run_and_stop)


def disk_full():
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("step", STEPS)
def test_stopped_run_leaves_whole_steps(place, whole, monkeypatch, step):
    # half of them by Ctrl-C
    interrupt = STEPS.index(step) % 2
    stop = (lambda: signal.raise_signal(signal.SIGINT)) if interrupt else disk_full
    before = STEPS[: STEPS.index(step)]
    with monkeypatch.context() as patch:
        # what was there before is taken over from the whole run
        if before:
            shutil.copytree(whole / "out", place / "out")
            (place / "out" / "preparation.json").unlink()
            for name in STEPS[len(before) :]:
                prepare_translation.Steps(place / "out", "translation data")
                path = place / "out" / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        stop_at(patch, step, stop)
        status, _, error = run(place)
    if interrupt:
        message = "\ninterrupted; complete steps are kept, run the same command again\n"
    else:
        message = (
            f"error: --output {place}/out: [Errno 28] No space left on device: make room, or give "
            "a folder where you may write\n"
        )
    assert (status, error) == (130 if interrupt else 1, message)
    left = contents(place / "out")
    assert {name for name in STEPS if any(file.startswith(name) for file in left)} == set(before)
    assert not list(place.rglob("*.partial"))
    assert (place / "out").exists() == bool(before)


def test_run_goes_on_to_the_same_bytes(place, whole, monkeypatch):
    for step in ("references", "bpe/codes", "clean", "bin"):
        with monkeypatch.context() as patch:
            stop_at(patch, step, lambda: signal.raise_signal(signal.SIGINT))
            assert run(place)[0] == 130
    status, printed, _ = run(place)
    assert status == 0
    assert re.findall(r"^(.*): complete$", printed, re.MULTILINE) == STEPS[:-1]
    assert contents(place / "out") == contents(whole / "out")
    status, printed, _ = run(place)
    assert (status, printed.count(": complete\n"), printed.count("at work")) == (0, len(STEPS), 0)


def test_another_option_or_input_is_refused(place, whole):
    shutil.copytree(whole / "out", place / "out")
    before = contents(place / "out")
    out = f"--output {place}/out: "
    for option, value, step, old in (
        ("--bpe-size", "9", "bpe/codes", "120"),
        ("--max-length", "9", "clean", "40"),
        ("--max-ratio", "2", "clean", "1.5"),
        ("--bpe-tool", "subword-nmt", "bpe/train.en", "fastbpe"),
        ("--no-aggressive-hyphens", None, "tokens/train.en", "True"),
        ("--separate-dictionaries", None, "bin", "False"),
        ("--target-lang", "de", None, None),
    ):
        result = run(place, option, *([value] if value else []))
        if step:
            name = option[2:].removeprefix("no-")
            message = rf"{out}{step} was made with another --{name} \({old}, now \w"
            assert refused(result, message), result
        else:
            assert result[0] == 0
    assert contents(place / "out") == before
    with (place / "dev.de").open("a") as file:
        file.write("Mehr.\n")
    result = run(place)
    assert refused(result, rf"{out}inputs.json was made with another --valid \([0-9a-f]+, now")
    assert contents(place / "out") == before


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
            gzip.compress(b"a\nb\xff\n"),
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
        ("--workers 0", "--workers 0 is no number of processes: give 1 or more"),
        ("--bpe-size 0", "--bpe-size 0 is no number of merges: give 1 or more"),
        ("--bpe-tool x", "--bpe-tool x is unknown: give fastbpe or subword-nmt"),
        ("--max-length 0", "--max-length 0 is no number of units: give 1 or more"),
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
    assert not list(place.rglob("*.partial"))


def test_input_that_changes_meanwhile_is_refused(place, monkeypatch):
    found = prepare_translation.survey
    changed = None

    def survey_and_change(*given):
        pairs = found(*given)
        write(place / changed, range(4), packed=changed == "new")
        return pairs

    monkeypatch.setattr(prepare_translation, "survey", survey_and_change)
    changed = "one"
    message = r"tokenize train, .*: 19 lines of a text of 25: leave the text as it is while it is"
    assert refused(run(place), message)
    assert not (place / "out" / "tokens").exists()
    changed = "new"
    message = (
        f"references/test.en has 4 lines, {place}/new.en.gz had 6: {bitext.UNCHANGED.split(',')[0]}"
    )
    assert refused(run(place, output="other"), message)
    assert not (place / "other" / "references").exists()


def test_log_of_a_failed_command_is_kept_and_nothing_else(place, whole, monkeypatch):
    shutil.copytree(whole / "out", place / "out")
    shutil.rmtree(place / "out" / "bin")
    failing = [sys.executable, "-S", "-c", "print('why'); raise SystemExit(3)"]

    @contextlib.contextmanager
    def fail(_, log):
        with run_command.child_process(failing, log) as child:
            yield child

    with monkeypatch.context() as patch:
        patch.setattr(preprocess_command, "child_process", fail)
        result = run(place)
    log = place / "out" / "preprocess.log"
    assert refused(result, rf".* ended with exit status 3: .* in {log} and run the same command")
    assert log.read_text() == "why\n"
    assert not (place / "out" / "bin").exists()
    assert run(place)[0] == 0
    assert not log.exists()


def test_folder_of_something_else_is_refused(place):
    (place / "out").mkdir()
    (place / "out" / "file").touch()
    assert refused(run(place), f"--output {place}/out exists and does not hold prepared translatio")
