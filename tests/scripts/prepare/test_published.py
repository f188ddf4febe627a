import dataclasses
import hashlib
import importlib
import json
import re
import shutil

import pytest

import fairseq_plugins  # noqa: F401 (registers the architectures)
from scripts._shared import commands as run_command
from scripts.prepare import _binarize
from tests.scripts.prepare.file_server import serve
from tests.scripts.prepare.small_datasets import (
    PTB,
    SMALL,
    SPLITS,
    WORDS,
    caller,
    expected_symbols,
    given,
    options_of,
    small_scripts,
    symbols,
    tarred,
    zipped,
)


@pytest.fixture
def scripts(monkeypatch):
    return small_scripts(monkeypatch)


@pytest.fixture
def call(scripts, monkeypatch, tmp_path, capsys):
    return caller(scripts, monkeypatch, tmp_path / "out", capsys)


@pytest.mark.parametrize("name", SMALL)
def test_corpus_from_a_file(call, tmp_path, name):
    status, printed, error = call(name, "--from", given(tmp_path, name), *options_of(name))
    assert (status, error) == (0, "")
    out = tmp_path / "out"
    assert {split: symbols(out, split) for split in SPLITS} == expected_symbols(name)
    assert sorted(path.name for path in out.iterdir()) == ["bin", "corpus.json"]
    assert {path.name for path in (out / "bin").iterdir()} - {"preprocess.log"} == {
        "dict.txt",
        *(f"{split}.{end}" for split in SPLITS for end in ("bin", "idx")),
    }
    description = json.loads((out / "corpus.json").read_text())
    _, _, checked, changes = SMALL[name]
    assert description["vocabulary"] == changes["vocabulary"]
    assert description.get("newlines") == ("eos" if name == "enwik8" else None)
    assert description["checksums"].keys() == checked.keys()
    for split in SPLITS:
        assert description["splits"][split]["tokens"] == len(symbols(out, split).split())
    assert not (tmp_path / "out.partial").exists()
    last = printed.splitlines()[-1]
    assert last.startswith("next: ")
    _, interpreter, recipe, *words = last.split()
    assert (interpreter, words) == ("bash", ["train", str(out), "CHECKPOINTS"])
    assert (run_command.ROOT / recipe).is_file()
    # the convention of newlines is the all-attention paper's
    assert ("all_attention" in recipe) == (name == "enwik8")


@pytest.mark.parametrize("name", SMALL)
def test_corpus_from_a_mirror(call, tmp_path, name):
    with serve({}) as empty, serve(SMALL[name][1]) as server:
        mirrors = ("--mirror", empty.url, "--mirror", f"{server.url}/folder/")
        status, _, error = call(name, *mirrors, *options_of(name))
    assert (status, error) == (0, "")
    out = tmp_path / "out"
    assert {split: symbols(out, split) for split in SPLITS} == expected_symbols(name)
    assert [path for path, _ in empty.requests] == [f"/{file}" for file in SMALL[name][1]]
    assert not (tmp_path / "out.partial").exists()


def test_given_mirrors_are_tried_before_the_known_ones(call, scripts, tmp_path, monkeypatch):
    with serve(SMALL["text8"][1]) as known, serve({}) as mirror:
        published = dataclasses.replace(scripts["text8"].TEXT8, mirrors=(known.url,))
        monkeypatch.setattr(scripts["text8"], "TEXT8", published)
        status, printed, _ = call("text8", "--mirror", mirror.url)
    assert status == 0
    tried = re.findall("download (.*)/text8.zip", printed)
    assert tried == [mirror.url, known.url]


@pytest.mark.parametrize("name", ["enwik8", "text8"])
def test_raw_text_is_accepted(call, tmp_path, name):
    (tmp_path / "any_name").write_bytes(SMALL[name][2][name])
    assert call(name, "--from", tmp_path / "any_name", *options_of(name))[0] == 0
    out = tmp_path / "out"
    assert {split: symbols(out, split) for split in SPLITS} == expected_symbols(name)


@pytest.mark.parametrize("archive", [zipped, tarred])
def test_archive_of_ptb_is_accepted(call, tmp_path, archive):
    (tmp_path / "archive").write_bytes(archive(PTB))
    assert call("ptb", "--from", tmp_path / "archive")[0] == 0
    assert {split: symbols(tmp_path / "out", split) for split in SPLITS} == WORDS


def test_corpus_of_words_with_the_command_itself(call, tmp_path, monkeypatch):
    monkeypatch.setattr(_binarize, "child_process", run_command.child_process)
    status, printed, _ = call("ptb", "--from", given(tmp_path, "ptb"), "--workers", "3")
    assert status == 0
    assert re.search(r"^\$ \S*fairseq-preprocess --only-source", printed, re.MULTILINE)
    assert {split: symbols(tmp_path / "out", split) for split in SPLITS} == WORDS
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("name", SMALL)
def test_second_run_does_nothing(call, tmp_path, name):
    source = given(tmp_path, name)
    _, first, _ = call(name, "--from", source, *options_of(name))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    shutil.rmtree(tmp_path / "given")
    status, printed, _ = call(name, *options_of(name))
    assert status == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    lines = printed.splitlines()
    assert lines[0] == f"{tmp_path}/out is complete, nothing to do:"
    # the same sizes as after the work
    assert lines[1:] == first.splitlines()[1 - len(lines) :]


@pytest.mark.parametrize("name", SMALL)
def test_given_dictionary_is_used_and_recorded(call, tmp_path, name):
    srcdict = tmp_path / "dict.txt"
    lines = {"enwik8": "32 3\n98 2\n97 1\n", "text8": "_ 3\nb 2\na 1\n"}.get(name, "b 2\n")
    srcdict.write_text(lines)
    source = given(tmp_path, name)
    options = (*options_of(name), "--srcdict", srcdict)
    status, printed, _ = call(name, "--from", source, *options)
    assert status == 0
    assert (tmp_path / "out" / "bin" / "dict.txt").read_text() == lines
    expected = {
        split: text if name in ("enwik8", "text8") else re.sub(r"\b[ac]\b", "<unk>", text)
        for split, text in expected_symbols(name).items()
    }
    assert {split: symbols(tmp_path / "out", split) for split in SPLITS} == expected
    description = json.loads((tmp_path / "out" / "corpus.json").read_text())
    assert description["srcdict"] == hashlib.sha256(lines.encode()).hexdigest()
    if name not in ("enwik8", "text8"):
        assert "train: 3 words are not in the dictionary: now <unk>" in printed
    assert call(name, *options)[0] == 0


def test_dropped_newlines_are_recorded(call, tmp_path):
    assert call("enwik8", "--from", given(tmp_path, "enwik8"), "--newlines", "drop")[0] == 0
    description = json.loads((tmp_path / "out" / "corpus.json").read_text())
    assert (description["newlines"], description["vocabulary"]) == ("drop", 3)
    assert "</s>" not in symbols(tmp_path / "out", "train")


def test_published_facts_have_their_shape():
    for name, (constant, files, checked, _) in SMALL.items():
        published = getattr(importlib.import_module(f"scripts.prepare.{name}"), constant)
        assert published.files == tuple(files)
        assert published.checksums.keys() == checked.keys()
        for known in published.checksums.values():
            assert re.fullmatch("[0-9a-f]+", known.digest)
            assert len(known.digest) == 2 * hashlib.new(known.algorithm).digest_size
        assert all(mirror.startswith(("https://", "http://")) for mirror in published.mirrors)
        if name in ("enwik8", "text8"):
            assert published.sizes == {"train": 9 * 10**7, "valid": 5 * 10**6, "test": 5 * 10**6}
