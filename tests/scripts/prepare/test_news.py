import gzip
import json
import re
import sys

import pytest
from fairseq.data import Dictionary
from sacremoses import MosesDetokenizer

from fairseq_plugins.segment_language_model.streams import load_tokens
from scripts._shared import commands as run_command
from scripts.prepare import _binarize, _subwords
from scripts.prepare import news as prepare_news
from tests.scripts.prepare.preprocess_in_process import in_this_process

SPLITS = ("train", "valid", "test")
SPLIT_TEXTS = {
    "train": "\n \nThe <unk> cat sat.\nIt's low & lower.\n\n\t\nA low cat.\x07\n\x07\n"
    "Lowest\u2028cat!",
    "valid": "A zebra sat.\n\nLow.\n",
    "test": "A cat sat.\r\n\r\nIt's low.\r\n",
}
TOKENS = {
    "train": "The &lt; unk &gt; cat sat .\nIt &apos;s low &amp; lower .\n\n"
    "A low cat .\n\nLowest cat !\n",
    "valid": "A zebra sat .\n\nLow .\n",
    "test": "A cat sat .\n\nIt &apos;s low .\n",
}
NUMBERS = range(12)
OTHER_WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


@pytest.fixture(autouse=True)
def _no_other_process(monkeypatch):
    monkeypatch.setattr(_binarize, "child_process", in_this_process)


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """Runs the script; returns its status, stdout and stderr."""

    def run(*options, source="in", output="out"):
        words = ["prepare_news.py", "--input", tmp_path / source, "--output", tmp_path / output]
        if "--workers" not in options:
            words += ["--workers", "1"]
        monkeypatch.setattr(sys, "argv", [*map(str, words), "--bpe-size", "20", *map(str, options)])
        status = prepare_news.main()
        return status, *capsys.readouterr()

    return run


def write_split(folder, texts=SPLIT_TEXTS, suffix=".txt"):
    folder.mkdir()
    for split, text in texts.items():
        content = text.encode()
        (folder / f"{split}{suffix}").write_bytes(
            gzip.compress(content) if suffix.endswith(".gz") else content
        )


def article(number):
    """Two paragraphs, the last of which is the article's own."""
    word = OTHER_WORDS[number % len(OTHER_WORDS)]
    return f"The {word} is low, \u00e9t\u00e9.\n\n  \nArticle x{number:02}x ended.\n"


def write_articles(folder):
    for number in NUMBERS:
        place = folder / f"day{number // 5}" / (f"{number:02}.txt" + ".gz" * (number % 2))
        place.parent.mkdir(parents=True, exist_ok=True)
        content = article(number).encode()
        place.write_bytes(gzip.compress(content, mtime=0) if number % 2 else content)
    (folder / "notes.md").write_text("no article")


def text_of(tmp_path, place, split, output="out"):
    return (tmp_path / output / place / f"{split}.txt").read_text(encoding="utf-8")


def symbols(tmp_path, split):
    folder = tmp_path / "out" / "bin"
    dictionary = Dictionary.load(str(folder / "dict.txt"))
    return " ".join(dictionary[token] for token in load_tokens(str(folder / split), dictionary))


def described(tmp_path, output="out"):
    return json.loads((tmp_path / output / "preparation.json").read_text(encoding="utf-8"))


def contents(folder):
    """Bytes of all files but the records, which hold times."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("steps.json", "preprocess.log")
    }


def refused(result, message):
    status, _, error = result
    return status == 1 and re.match(f"error: {message}", error)


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_splits_keep_articles_whole_and_in_order(call, tmp_path, suffix):
    write_split(tmp_path / "in", suffix=suffix)
    status, _, error = call()
    assert (status, error) == (0, "")
    for split in SPLITS:
        assert text_of(tmp_path, "tokens", split) == TOKENS[split]
        assert text_of(tmp_path, "bpe", split).replace("@@ ", "") == TOKENS[split]
    assert (
        symbols(tmp_path, "train")
        == text_of(tmp_path, "bpe", "train").replace("\n", " </s> ").replace("  ", " ").strip()
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("bin", "bpe", "held_out.json", "preparation.json", "steps.json", "tokens")
    ]
    held_out = json.loads((tmp_path / "out" / "held_out.json").read_text())
    assert held_out == {"valid": [f"valid{suffix}"], "test": [f"test{suffix}"]}


def test_text_is_detokenized_from_what_is_binarized(call, tmp_path):
    write_split(tmp_path / "in")
    call()
    lines = symbols(tmp_path, "test").removesuffix(" </s>").replace("@@ ", "").split(" </s>")
    detokenizer = MosesDetokenizer(lang="en")
    found = [detokenizer.detokenize(line.split()) for line in lines]
    assert found == ["A cat sat.", "", "It's low."]


def test_sizes_are_those_of_the_text(call, tmp_path):
    write_split(tmp_path / "in")
    call()
    description = described(tmp_path)
    kept = "The <unk> cat sat.\nIt's low & lower.\n\nA low cat.\x07\n\nLowest\u2028cat!\n"
    for split, sizes in description["splits"].items():
        words, units = TOKENS[split].split(), text_of(tmp_path, "bpe", split).split()
        lines = TOKENS[split].count("\n")
        assert (sizes["lines"], sizes["words"], sizes["units"]) == (lines, len(words), len(units))
        assert sizes["tokens"] == len(symbols(tmp_path, split).split()) == len(units) + lines
        assert sizes["tokens_per_word"] == pytest.approx(sizes["tokens"] / (len(words) + lines))
        assert sizes["unknown_units"] == symbols(tmp_path, split).split().count("<unk>")
    splits = description["splits"]
    assert [splits[split]["articles"] for split in SPLITS] == [3, 2, 2]
    assert splits["train"]["bytes"] == len(kept.encode())
    # the z of zebra is not in the training part
    assert (splits["train"]["unknown_units"], splits["valid"]["unknown_units"] > 0) == (0, True)
    assert (description["bpe-size"], description["merges"] <= 20) == (20, True)
    assert description["symbols"] == len(
        (tmp_path / "out" / "bin" / "dict.txt").read_text(encoding="utf-8").splitlines()
    )


def test_articles_are_held_out_at_random(call, tmp_path):
    write_articles(tmp_path / "in")
    assert call("--valid", "2", "--test", "3", "--seed", "5")[0] == 0
    found = {
        split: [
            int(number) for number in re.findall(r"x(\d\d)x", text_of(tmp_path, "tokens", split))
        ]
        for split in SPLITS
    }
    assert [len(found[split]) for split in SPLITS] == [7, 2, 3]
    assert all(numbers == sorted(numbers) for numbers in found.values())
    assert sorted(found["train"] + found["valid"] + found["test"]) == list(NUMBERS)
    for split, numbers in found.items():
        articles = text_of(tmp_path, "tokens", split).removesuffix("\n").split("\n\n")
        # an empty line within the file of an article is dropped
        assert [len(text.split("\n")) for text in articles] == [2] * len(numbers)
    held_out = json.loads((tmp_path / "out" / "held_out.json").read_text())
    for split in ("valid", "test"):
        names = [
            f"day{number // 5}/{number:02}.txt" + ".gz" * (number % 2) for number in found[split]
        ]
        assert held_out[split] == names
    description = described(tmp_path)
    assert [description[option] for option in ("valid", "test", "seed")] == [2, 3, 5]
    call("--valid", "2", "--test", "3", "--seed", "6", output="other")
    assert json.loads((tmp_path / "other" / "held_out.json").read_text()) != held_out


def test_number_of_held_out_articles_is_checked(call, tmp_path):
    write_articles(tmp_path / "in")
    # the paper's
    message = "--valid 5000 and --test 5000 leave none of 12 articles to train on: give smaller"
    assert refused(call(), message)
    assert refused(call("--valid", "6", "--test", "6"), "--valid 6 and --test 6 leave none of 12")
    assert refused(call("--valid", "0"), "--valid is 0: it must be at least 1")
    assert refused(call("--test", "-1"), "--test is -1: it must be at least 1")
    assert not (tmp_path / "out").exists()


def test_codes_and_dictionary_are_those_of_the_training_part(call, tmp_path):
    write_split(tmp_path / "in")
    call()
    texts = {**SPLIT_TEXTS, "valid": "zebra zebra zebra\n", "test": "quiz quiz quiz\n"}
    write_split(tmp_path / "other", texts)
    call(source="other", output="out2")
    _subwords.learn([tmp_path / "out" / "tokens" / "train.txt"], 20, tmp_path / "codes")
    for name in ("bpe/codes", "bin/dict.txt"):
        ours = (tmp_path / "out" / name).read_bytes()
        assert (tmp_path / "out2" / name).read_bytes() == ours
    assert (tmp_path / "codes").read_bytes() == (tmp_path / "out" / "bpe" / "codes").read_bytes()


def test_processes_and_tools_make_the_same(call, tmp_path):
    write_articles(tmp_path / "in")
    held_out = ("--valid", "1", "--test", "1")
    assert call(*held_out)[0] == 0
    assert call(*held_out, "--workers", "2", "--bpe-tool", "subword-nmt", output="other")[0] == 0
    first, second = contents(tmp_path / "out"), contents(tmp_path / "other")
    assert first.pop("preparation.json") != second.pop("preparation.json")
    assert first == second


STEPS = [
    *(f"tokens/{split}.txt" for split in SPLITS),
    "bpe/codes",
    *(f"bpe/{split}.txt" for split in SPLITS),
    "bin",
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("step", ["held_out.json", *STEPS])
def test_interrupted_run_goes_on_to_the_same_bytes(call, tmp_path, monkeypatch, step, error):
    write_split(tmp_path / "in")
    run_step = prepare_news.Steps.run

    def fail_late(steps, name, options, sources, work):
        def work_and_fail(target):
            work(target)
            raise error

        return run_step(steps, name, options, sources, work_and_fail if name == step else work)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_news.Steps, "run", fail_late)
        status, _, message = call()
    if error is KeyboardInterrupt:
        expected = "\ninterrupted; complete steps are kept, run the same command again\n"
    else:
        expected = (
            f"error: --output {tmp_path}/out: {error}: make room, or give a folder where you may "
            "read and write\n"
        )
    assert (status, message) == (1 + 129 * (error is KeyboardInterrupt), expected)
    before = ["held_out.json", *STEPS]
    before = before[: before.index(step)]
    assert (tmp_path / "out").exists() == bool(before)
    left = contents(tmp_path / "out")
    assert sorted(left) == sorted(before)
    status, printed, _ = call()
    assert status == 0
    assert re.findall(r"^(.*): complete$", printed, re.MULTILINE) == before
    call(output="whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_second_run_does_nothing(call, tmp_path):
    write_split(tmp_path / "in")
    call()
    before = contents(tmp_path / "out")
    status, printed, _ = call("--workers", "2")
    assert (status, printed.count(": complete\n"), printed.count("at work")) == (0, 9, 0)
    assert contents(tmp_path / "out") == before


def test_another_option_or_input_is_refused(call, tmp_path):
    write_split(tmp_path / "in")
    call()
    before = contents(tmp_path / "out")
    out = f"--output {tmp_path}/out: "
    result = call("--bpe-size", "9")
    assert refused(result, rf"{out}bpe/codes was made with another --bpe-size \(20, now 9\): give")
    assert result[2].endswith(
        f"remove {tmp_path}/out/bpe/codes to have this and what depends on it made again\n"
    )
    result = call("--language", "de")
    assert refused(
        result, rf"{out}tokens/train.txt was made with another --language \(en, now de\)"
    )
    for split in SPLITS:
        assert f"{tmp_path}/out/tokens/{split}.txt" in result[2]
    result = call("--bpe-tool", "subword-nmt")
    assert refused(result, rf"{out}bpe/train.txt was made with another --bpe-tool \(fastbpe, now")
    assert contents(tmp_path / "out") == before
    with (tmp_path / "in" / "valid.txt").open("a") as file:
        file.write("More.\n")
    assert refused(call(), rf"{out}held_out.json was made with another --input \([0-9a-f]+, now")
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "held_out.json").unlink()
    assert call()[0] == 0
    assert text_of(tmp_path, "tokens", "valid").endswith("\nMore .\n")


def test_codes_are_learned_again_where_they_were_removed(call, tmp_path):
    write_split(tmp_path / "in")
    call()
    (tmp_path / "out" / "bpe" / "codes").unlink()
    status, printed, _ = call("--bpe-size", "5")
    assert (status, printed.count("tokens/")) == (0, printed.count(".txt: complete"))
    call("--bpe-size", "5", output="other")
    assert contents(tmp_path / "out") == contents(tmp_path / "other")


def test_log_of_a_failed_command_is_kept_and_nothing_else(call, tmp_path, monkeypatch):
    write_split(tmp_path / "in")
    failing = [sys.executable, "-c", "print('why'); raise SystemExit(3)"]
    with monkeypatch.context() as patch:
        child = run_command.child_process
        patch.setattr(_binarize, "child_process", lambda _, log: child(failing, log))
        result = call()
    log = tmp_path / "out" / "preprocess.log"
    assert refused(result, rf".* ended with exit status 3: .* in {log} and run the same command")
    assert log.read_text() == "why\n"
    assert not (tmp_path / "out" / "bin").exists()
    assert not list((tmp_path / "out").rglob("*.partial*"))
    assert call()[0] == 0
    assert not log.exists()


def test_input_that_changes_meanwhile_is_refused(call, tmp_path, monkeypatch):
    write_split(tmp_path / "in")
    survey = prepare_news.survey

    def survey_and_change(news, target):
        found = survey(news, target)
        # as many lines in more articles, or fewer lines
        (tmp_path / "in" / "train.txt").write_text("a\n\nb\n\nc\n\nd\n" if same else "a\n")
        return found

    monkeypatch.setattr(prepare_news, "survey", survey_and_change)
    for same, message in (
        (False, "tokenize train.txt, .*: 1 lines, the text has 7: leave it as it is"),
        (True, "tokenize train.txt, .*: 3 empty lines, the text has 1: leave it as it is"),
    ):
        (tmp_path / "in" / "train.txt").write_text("a\nb\n\nc\nd\ne\nf\n")
        assert refused(call(output=f"out{same}"), message)
        assert not (tmp_path / f"out{same}" / "tokens").exists()


def test_line_that_is_no_utf8_is_refused(call, tmp_path):
    write_split(tmp_path / "in")
    (tmp_path / "in" / "test.txt").write_bytes(b"a\n\n\xe9t\xe9\n")
    message = rf"{tmp_path}/in/test.txt, line 3: byte 1 of the line is no UTF-8 \(.*\): convert"
    assert refused(call(), message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"\n \n\x07\n"])
def test_file_without_text_is_refused(call, tmp_path, content):
    write_split(tmp_path / "in")
    (tmp_path / "in" / "valid.txt").write_bytes(content)
    assert refused(call(), f"--input {tmp_path}/in: valid.txt has no text: remove or replace it")
    assert not (tmp_path / "out").exists()


def test_input_that_is_not_of_the_two_kinds_is_refused(call, tmp_path):
    label = f"--input {tmp_path}/in "
    assert refused(call(), f"{label}is no folder: give the folder of the articles")
    folder = tmp_path / "in"
    folder.mkdir()
    assert refused(call(), rf"{label}has no file \*.txt or \*.txt.gz: give the folder of")
    (folder / "train.txt").write_text("a\n")
    assert refused(call(), f"{label}has train.txt but no valid.txt: add it, or rename the former")
    for split in ("valid", "test"):
        (folder / f"{split}.txt").write_text("a\n")
    (folder / "more").mkdir()
    (folder / "more" / "b.txt").write_text("b\n")
    assert refused(call(), f"{label}has train.txt and more/b.txt beside it: remove the latter, or")
    (folder / "more" / "b.txt.gz").write_bytes(gzip.compress(b"b\n"))
    assert refused(call(), rf"{label}has more/b.txt(.gz)? and more/b.txt(.gz)?: remove one of them")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seed 3", "--seed 3 does not go with --input .*, which is split already: leave it out"),
        ("--workers 0", "--workers is 0: it must be at least 1"),
        ("--bpe-size 0", "--bpe-size is 0: it must be at least 1"),
        ("--bpe-tool x", "--bpe-tool x is unknown: give fastbpe or subword-nmt"),
        ("--language xx", "--language xx is none that sacremoses has rules for: give one of"),
    ],
)
def test_impossible_option_is_refused(call, tmp_path, options, message):
    write_split(tmp_path / "in")
    assert refused(call(*options.split()), message)
    assert not (tmp_path / "out").exists()


def test_output_within_the_input_is_refused(call, tmp_path):
    write_split(tmp_path / "in")
    message = f"--output {tmp_path}/in/out lies within --input {tmp_path}/in, where its texts would"
    assert refused(call(output="in/out"), message)
