import json
import re
import string
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.prepare import _preprocess as preprocess_command
from scripts.prepare import python_source as prepare_python_source

ALL_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
EOS = 2
SPECIAL_SYMBOLS = 4
LEFT_OUT = {
    "test/left_out.py": b"x = 'in test'\n",
    "package/tests/left_out.py": b"x = 'in tests'\n",
    "idlelib/idle_test/left_out.py": b"x = 'in idle_test'\n",
    "site-packages/left_out.py": b"x = 'in site-packages'\n",
    "dist-packages/left_out.py": b"x = 'in dist-packages'\n",
    "__pycache__/left_out.txt": b"x = 'not Python'\n",
    "encodings/left_out.py": b"x = 'in encodings'\n",
    "config-3.11-x86_64-linux-gnu/left_out.py": b"x = 'in config'\n",
    "_sysconfigdata__linux_x86_64-linux-gnu.py": b"x = 'left_out sysconfigdata'\n",
    "sitecustomize.py": b"x = 'left_out sitecustomize'\n",
    "accent.py": "x = 'left_out \u00e9'\n".encode(),
    "tab.py": b"if x:\n\ty = 'left_out'\n",
    "carriage_return.py": b"x = 'left_out'\r\n",
    "form_feed.py": b"x = 'left_out'\n\f\n",
    "empty.py": b"",
}


def exactly(text):
    return f"^{re.escape(text)}$"


def source(index):
    if index == 0:
        return f"# {ALL_CHARACTERS}\n"
    if index == 39:
        return "# a file too long to be held out\n" * 2000
    # trailing blanks, an empty line, indentation
    return f"def f{index}():  \n\n    return {index}\n"


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stdlib")
    for index in range(120):
        path = folder / ("package" if index >= 60 else "") / f"m{index:03}.py"
        path.parent.mkdir(exist_ok=True)
        # the corpus has to end this file's last line itself
        text = source(index).rstrip("\n") if index == 5 else source(index)
        path.write_bytes(text.encode())
    for name, content in LEFT_OUT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def corpus(stdlib, tmp_path_factory):
    output = tmp_path_factory.mktemp("corpus") / "data"
    prepare_python_source.prepare(output, stdlib)
    return output


def texts(corpus):
    return {
        split: (corpus / "text" / f"{split}.txt").read_bytes().decode("ascii")
        for split in ("train", "valid", "test")
    }


def test_each_file_is_in_one_part(corpus):
    # sorted by relative path: m000 to m059, then package/m060 to package/m119
    test = [19, 59, 79, 99, 119]
    valid = [9, 69]
    train = [index for index in range(120) if index not in test + valid]
    assert texts(corpus) == {
        "train": "".join(map(source, train)),
        "valid": "".join(map(source, valid)),
        "test": "".join(map(source, test)),
    }


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_tokens_are_the_characters_of_the_text(corpus, split):
    symbols = [line.split()[0] for line in (corpus / "bin/dict.txt").open(encoding="utf-8")]
    tokens = np.fromfile(corpus / "bin" / f"{split}.bin", dtype=np.uint16)
    decoded = "".join(
        "\n" if token == EOS else symbols[token - SPECIAL_SYMBOLS] for token in tokens
    )
    assert decoded.replace("\u2581", " ") == texts(corpus)[split]


def test_dictionary_has_the_observed_symbols_only(corpus):
    symbols = [line.split()[0] for line in (corpus / "bin/dict.txt").open(encoding="utf-8")]
    assert sorted(symbols) == sorted(ALL_CHARACTERS.replace(" ", "\u2581"))


def test_description_tells_sizes(corpus):
    description = json.loads((corpus / "corpus.json").read_text())
    assert description["symbols"] == 95
    assert {split: size["files"] for split, size in description["splits"].items()} == {
        "train": 113,
        "valid": 2,
        "test": 5,
    }
    assert {split: size["characters"] for split, size in description["splits"].items()} == {
        split: len(text) for split, text in texts(corpus).items()
    }


def test_interrupted_run_leaves_nothing_and_the_next_builds_the_same_bytes(
    corpus, stdlib, tmp_path
):
    output = tmp_path / "data"

    def interrupt(folder, characters):
        (folder / "stray").touch()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_python_source, "binarize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare_python_source.prepare(output, stdlib)
    assert not output.exists()
    assert (tmp_path / "data.partial" / "stray").exists()

    prepare_python_source.prepare(output, stdlib)

    def contents(folder):
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            # the logs have the folder's name
            if path.is_file() and path.suffix != ".log"
        }

    assert contents(output) == contents(corpus)
    assert {"bin/train.bin", "bin/train.idx", "text/test.chars"} <= contents(corpus).keys()
    assert not (tmp_path / "data.partial").exists()


def test_second_run_does_nothing(corpus, capsys):
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    prepare_python_source.prepare(corpus, Path("no such library"))
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before
    assert capsys.readouterr().out.splitlines()[0] == f"{corpus} is complete, nothing to do:"


def test_command_is_printed(stdlib, tmp_path, monkeypatch, capsys):
    ran = []

    def run(words, log):
        ran.append(words)
        raise KeyboardInterrupt

    monkeypatch.setattr(preprocess_command, "child_process", run)
    with pytest.raises(KeyboardInterrupt):
        prepare_python_source.prepare(tmp_path / "data", stdlib)
    printed = capsys.readouterr().out.replace("\\\n", "").split()
    assert printed == ["$", *ran[0]]
    partial = tmp_path / "data.partial"
    assert ran[0][1:] == [
        "--only-source",
        *("--trainpref", f"{partial}/text/train.chars"),
        *("--validpref", f"{partial}/text/valid.chars"),
        *("--testpref", f"{partial}/text/test.chars"),
        *("--destdir", f"{partial}/bin"),
        *("--padding-factor", "1", "--workers", "3"),
    ]


def test_stripped_library_is_refused(tmp_path):
    (tmp_path / "abc.py").write_text("x = 1\n")
    message = (
        f"standard library {tmp_path}: 1 usable source files, the corpus needs at least 100: this "
        "Python has its library stripped or zipped, run the script with a Python that has the "
        "library's source files"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        prepare_python_source.read_corpus(tmp_path)


def test_symbol_unknown_in_training_is_refused():
    message = (
        "test text: the characters ['%', '~'] are not in the training text, the model would see "
        "<unk>: run the script with a Python that has the whole library"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        prepare_python_source.check_symbols({"train": "ab\n", "valid": "a\n", "test": "~a%\n"})


def test_folder_with_something_else_is_refused(tmp_path, stdlib):
    message = (
        f"--output {tmp_path} exists and is no corpus of this script: "
        "remove it or give another folder"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        prepare_python_source.prepare(tmp_path, stdlib)


def test_place_without_write_access_is_refused(tmp_path, stdlib):
    (tmp_path / "file").touch()
    message = (
        f"--output {tmp_path}/file/data cannot be written (Not a directory): "
        "give a folder in a place where you may write"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        prepare_python_source.prepare(tmp_path / "file" / "data", stdlib)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[None] a/test.chars: 2 sents, 9 tokens, 0.0% replaced (by <unk>)", "9 tokens with 0.0"),
        ("[None] a/test.chars: 2 sents, 10 tokens, 10.0% replaced (by <unk>)", "10 tokens with 10"),
        ("[None] a/valid.chars: 2 sents, 10 tokens, 0.0% replaced (by <unk>)", "no tokens with no"),
    ],
)
def test_tokens_other_than_the_characters_are_refused(tmp_path, line, found):
    (tmp_path / "preprocess.log").write_text(line)
    message = (
        " % unknown for 10 characters, each character must be one known token: "
        f"see {tmp_path}/preprocess.log and use the fairseq version that this project pins"
    )
    with pytest.raises(ValueError, match=re.escape(message) + "$") as error:
        prepare_python_source.check_tokens(tmp_path, "test", 10)
    assert str(error.value).startswith(f"fairseq-preprocess, test: {found}")


def test_as_many_tokens_as_characters_are_accepted(tmp_path):
    line = "[None] a/test.chars: 2 sents, 10 tokens, 0.0% replaced (by <unk>)"
    (tmp_path / "preprocess.log").write_text(line)
    prepare_python_source.check_tokens(tmp_path, "test", 10)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "\ninterrupted; the corpus will be built anew\n"),
        (ValueError("what is wrong"), 1, "error: what is wrong\n"),
    ],
)
def test_exit_status(monkeypatch, capsys, error, status, message):
    def fail(output, stdlib):
        raise error

    monkeypatch.setattr(prepare_python_source, "prepare", fail)
    monkeypatch.setattr(sys, "argv", ["prepare_python_source.py", "--output", "data"])
    assert prepare_python_source.main() == status
    assert capsys.readouterr().err == message
