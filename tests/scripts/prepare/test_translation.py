import contextlib
import gzip
import json
import re
import shutil
import signal
import sys

import pytest
from fairseq.data import Dictionary, data_utils
from sacremoses import MosesDetokenizer

from scripts._shared import commands as run_command
from scripts.prepare import _binarize, _lines, _subwords
from scripts.prepare import translation as prepare_translation
from tests.scripts.prepare.translation_texts import (
    EMPTY,
    LANGUAGES,
    LONG,
    UNEQUAL,
    refused,
    run,
    write_all,
)

STEPS = [
    *("inputs.json", "references"),
    *(f"tokens/{part}.{one}" for part in ("train", "valid", "test", "test1") for one in LANGUAGES),
    "bpe/codes",
    *(f"bpe/{part}.{one}" for part in ("train", "valid", "test", "test1") for one in LANGUAGES),
    *("clean", "bin"),
]


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
            if short >= 1 and long <= 40 and long * 2 <= short * 3:
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
    _subwords.learn(sources, 120, tmp_path / "codes")
    assert (tmp_path / "codes").read_bytes() == (out / "bpe" / "codes").read_bytes()
    _subwords.learn(sources[:1], 120, tmp_path / "codes")
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
    monkeypatch.setattr(_lines, "CHUNK", 4)
    # those of fairseq would take seconds more
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
                path = place / "out" / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        stop_at(patch, step, stop)
        status, _, error = run(place)
    if interrupt:
        message = "\ninterrupted; complete steps are kept, run the same command again\n"
    else:
        message = (
            f"error: --output {place}/out: [Errno 28] No space left on device: make room, or give "
            "a folder where you may read and write\n"
        )
    assert (status, error) == (130 if interrupt else 1, message)
    left = contents(place / "out")
    assert {name for name in STEPS if any(file.startswith(name) for file in left)} == set(before)
    assert not list(place.rglob("*.partial*"))
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
    ):
        result = run(place, option, *([value] if value else []))
        name = option[2:].removeprefix("no-")
        message = rf"{out}{step} was made with another --{name} \({old}, now \w"
        assert refused(result, message), result
    assert contents(place / "out") == before
    with (place / "dev.de").open("a") as file:
        file.write("Mehr.\n")
    result = run(place)
    assert refused(result, rf"{out}inputs.json was made with another --valid \([0-9a-f]+, now")
    assert contents(place / "out") == before


def test_log_of_a_failed_command_is_kept_and_nothing_else(place, whole, monkeypatch):
    shutil.copytree(whole / "out", place / "out")
    shutil.rmtree(place / "out" / "bin")
    failing = [sys.executable, "-S", "-c", "print('why'); raise SystemExit(3)"]

    @contextlib.contextmanager
    def fail(_, log):
        with run_command.child_process(failing, log) as child:
            yield child

    with monkeypatch.context() as patch:
        patch.setattr(_binarize, "child_process", fail)
        result = run(place)
    log = place / "out" / "preprocess.log"
    assert refused(result, rf".* ended with exit status 3: .* in {log} and run the same command")
    assert log.read_text() == "why\n"
    assert not (place / "out" / "bin").exists()
    assert run(place)[0] == 0
    assert not log.exists()
