import json
import os
import re
import string
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from scripts.prepare import _binarize, python_source
from tests.scripts.prepare.preprocess_in_process import in_this_process

ALL_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
EOS = 2
SPECIAL_SYMBOLS = 4
SUBWORDS = 130
SPLITS = ("train", "valid", "test")
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


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Has fairseq-preprocess run in this process: another would import for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_binarize, "child_process", in_this_process)
        yield


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
    python_source.prepare(output, stdlib, SUBWORDS)
    return output


def texts(corpus):
    return {
        split: (corpus / "text" / f"{split}.txt").read_bytes().decode("ascii") for split in SPLITS
    }


def dictionary(corpus):
    return [line.split(" ")[0] for line in (corpus / "bin/dict.txt").open(encoding="utf-8")]


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


@pytest.mark.parametrize("split", SPLITS)
def test_tokens_give_back_the_text(corpus, split):
    symbols = dictionary(corpus)
    tokens = np.fromfile(corpus / "bin" / f"{split}.bin", dtype=np.uint16)
    decoded = "".join(
        "\n" if token == EOS else symbols[token - SPECIAL_SYMBOLS] for token in tokens
    )
    assert decoded.replace("\u2581", " ") == texts(corpus)[split]
    # "    return " is one unit: units hold several words, and blanks only
    assert "\u2581\u2581" in symbols


def test_dictionary_has_every_unit_of_the_model_by_frequency(corpus):
    units = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "sentencepiece.model"))
    symbols = dictionary(corpus)
    assert sorted(symbols) == sorted(units.id_to_piece(list(range(1, SUBWORDS))))
    words = (corpus / "text/train.units").read_text(encoding="utf-8").split()
    counts = [words.count(symbol) for symbol in symbols]
    assert counts == sorted(counts, reverse=True)
    # a held-out text may have units that training has as parts of others only
    assert counts[-1] == 0


def test_units_are_those_of_fairseq(corpus):
    """What fairseq-interactive makes of a prompt is what the text was made of."""
    units = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "sentencepiece.model"))
    line = texts(corpus)["test"].splitlines()[2]
    assert line == "    return 19"
    encoded = (corpus / "text/test.units").read_text(encoding="utf-8").splitlines()[2]
    assert " ".join(units.encode(line, out_type=str)) == encoded


def test_description_tells_sizes(corpus):
    description = json.loads((corpus / "corpus.json").read_text())
    assert description["subwords"] == SUBWORDS
    sizes = description["splits"]
    assert {split: size["files"] for split, size in sizes.items()} == {
        "train": 113,
        "valid": 2,
        "test": 5,
    }
    for split, text in texts(corpus).items():
        assert sizes[split]["characters"] == len(text)
        tokens = np.fromfile(corpus / "bin" / f"{split}.bin", dtype=np.uint16)
        assert sizes[split]["tokens"] == len(tokens)


def test_interrupted_run_leaves_nothing_and_the_next_builds_the_same_bytes(
    corpus, stdlib, tmp_path
):
    output = tmp_path / "data"

    def interrupt(text, model, subwords):
        model.touch()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(python_source, "learn_units", interrupt)
        with pytest.raises(KeyboardInterrupt):
            python_source.prepare(output, stdlib, SUBWORDS)
    assert list(tmp_path.iterdir()) == []

    python_source.prepare(output, stdlib, SUBWORDS)

    def contents(folder):
        return {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            # the logs have the folder's name
            if path.is_file() and path.suffix != ".log"
        }

    assert contents(output) == contents(corpus)
    assert {"bin/train.bin", "bin/train.idx", "text/test.units"} <= contents(corpus).keys()
    assert list(tmp_path.iterdir()) == [output]


def test_second_run_does_nothing(corpus, capsys):
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*")}
    python_source.prepare(corpus, Path("no such library"), SUBWORDS)
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*")} == before
    assert capsys.readouterr().out.splitlines()[0] == f"{corpus} is complete, nothing to do:"


def test_command_is_printed(stdlib, tmp_path, monkeypatch, capsys):
    ran = []

    def run(words, log):
        ran.append(words)
        raise KeyboardInterrupt

    monkeypatch.setattr(_binarize, "child_process", run)
    with pytest.raises(KeyboardInterrupt):
        python_source.prepare(tmp_path / "data", stdlib, SUBWORDS)
    printed = capsys.readouterr().out.replace("\\\n", "").split()
    assert printed == ["$", *ran[0]]
    partial = tmp_path / f"data.partial-{os.getpid()}"
    assert ran[0][1:] == [
        "--only-source",
        *("--trainpref", f"{partial}/text/train.units"),
        *("--validpref", f"{partial}/text/valid.units"),
        *("--testpref", f"{partial}/text/test.units"),
        *("--destdir", f"{partial}/bin"),
        *("--srcdict", f"{partial}/text/dict.txt", "--workers", "3"),
    ]


def test_stripped_library_is_refused(tmp_path):
    (tmp_path / "abc.py").write_text("x = 1\n")
    message = (
        f"standard library {tmp_path}: 1 usable source files, the corpus needs at least 100: this "
        "Python has its library stripped or zipped, run the script with a Python that has the "
        "library's source files"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        python_source.read_corpus(tmp_path)


def test_character_unknown_in_training_is_refused(corpus, tmp_path):
    units = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "sentencepiece.model"))
    message = (
        "test text: it has characters that the training text lacks, the model would see <unk>: "
        "run the command with a Python that has the whole library"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        python_source.write_units("x = \u00e9\n", units, tmp_path / "test.units")
    assert not (tmp_path / "test.units").exists()


@pytest.mark.parametrize("subwords", [20, 100_000])
def test_a_number_of_units_that_cannot_be_learned_is_refused(stdlib, tmp_path, subwords):
    message = f"^--subwords is {subwords}: sentencepiece cannot learn so many units from .*: give "
    with pytest.raises(ValueError, match=message):
        python_source.prepare(tmp_path / "data", stdlib, subwords)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("content", [None, '{"subwords": 7}'])
def test_folder_with_something_else_is_refused(tmp_path, stdlib, content):
    if content:
        (tmp_path / "corpus.json").write_text(content)
    message = (
        f"--output {tmp_path} exists and does not hold this corpus with --subwords {SUBWORDS}: "
        "remove it or give another folder"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        python_source.prepare(tmp_path, stdlib, SUBWORDS)


def test_place_without_write_access_is_refused(tmp_path, monkeypatch, stdlib, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(python_source.sysconfig, "get_path", lambda name: str(stdlib))
    assert python_source.main(["--output", f"{tmp_path}/file/data"]) == 1
    assert capsys.readouterr().err.startswith(
        f"error: --output {tmp_path}/file/data: [Errno 20] Not a directory: "
    )


def test_units_unknown_to_fairseq_are_refused(stdlib, tmp_path, monkeypatch):
    monkeypatch.setattr(python_source, "preprocess", lambda *_: {"train": 0, "valid": 1, "test": 2})
    message = "fairseq-preprocess: 3 units are unknown, each must be one known token: use the fairs"
    with pytest.raises(ValueError, match=f"^{message}"):
        python_source.prepare(tmp_path / "data", stdlib, SUBWORDS)
    assert not (tmp_path / "data").exists()


def test_a_command_that_is_interrupted_says_so(monkeypatch, capsys):
    def interrupt(output, stdlib, subwords, packages):
        raise KeyboardInterrupt

    monkeypatch.setattr(python_source, "prepare", interrupt)
    assert python_source.main(["--output", "data"]) == 130
    assert capsys.readouterr().err == "\ninterrupted; the corpus will be built anew\n"
