"""Source files of Python: the library, and a list of packages."""

import hashlib
import json
import string
import zipfile
from argparse import Namespace

import numpy as np
import pytest
import sentencepiece

from scripts.prepare import __main__ as preparation
from scripts.prepare import _split
from scripts.prepare._get import get_packages
from scripts.prepare._read import from_string
from tests.scripts.prepare.prepared import write_files
from tests.scripts.refusals import refused

ALL_CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " "
EOS = 2
PIECES = 130
LEFT_OUT = {
    **{
        f"{folder}/left_out.py": "x = 'left_out'\n"
        for folder in ("test", "package/tests", "idlelib/idle_test", "site-packages", "encodings")
    },
    "__pycache__/left_out.txt": "x = 'not Python'\n",
    "config-3.11-x86_64-linux-gnu/left_out.py": "x = 'left_out'\n",
    "_sysconfigdata__linux_x86_64-linux-gnu.py": "x = 'left_out'\n",
    "accent.py": "x = 'left_out \u00e9'\n",
    "tab.py": "if x:\n\ty = 'left_out'\n",
    "carriage_return.py": "x = 'left_out'\r\n",
    "empty.py": "",
}


def source(index):
    if index == 0:
        return f"# {ALL_CHARACTERS}\n"
    if index == 39:
        return "# a file too long to be held out\n" * 2000
    # trailing blanks, an empty line, indentation
    return f"def f{index}():  \n\n    return {index}\n"


@pytest.fixture
def library(tmp_path, monkeypatch):
    folder = tmp_path / "library"
    for index in range(120):
        # the corpus has to end this file's last line itself
        text = source(index).rstrip("\n") if index == 5 else source(index)
        write_files(folder, {f"{'package/' * (index >= 60)}m{index:03}.py": text})
    write_files(folder, LEFT_OUT)
    monkeypatch.setattr(preparation.sysconfig, "get_path", lambda name: folder)
    return folder


def test_each_file_is_in_one_part_and_tokens_give_back_the_text(library, prepare, tmp_path):
    assert prepare("python_source", "--pieces", PIECES, "--workers", 1)[0] == 0
    corpus = tmp_path / "out"
    # sorted by relative path: m000 to m059, then package/m060 to package/m119
    parts = {"valid": [9, 69], "test": [19, 59, 79, 99, 119]}
    parts["train"] = sorted({*range(120)}.difference(*parts.values()))
    symbols = [line.split(" ")[0] for line in (corpus / "bin/dict.txt").open(encoding="utf-8")]
    description = json.loads((corpus / "preparation.json").read_text())
    assert description["pieces"] == PIECES
    for split, files in parts.items():
        text = (corpus / "text" / f"{split}.txt").read_bytes().decode("ascii")
        assert text == "".join(map(source, files))
        tokens = np.fromfile(corpus / "bin" / f"{split}.bin", dtype=np.uint16)
        decoded = "".join("\n" if token == EOS else symbols[token - 4] for token in tokens)
        assert decoded.replace("\u2581", " ") == text
        sizes = {"texts": len(files), "characters": len(text), "tokens": len(tokens)}
        assert sizes.items() <= description["splits"][split].items()
    units = json.loads((corpus / "bin" / "units.json").read_text())
    assert (units["unit"], units["bpe"]) == ("subwords", "sentencepiece")
    assert (corpus / "bin" / units["model"]).resolve() == corpus / "pieces/sentencepiece.model"
    # the dictionary has every unit of the model, by frequency: held-out texts may use units that
    # occur in training only as parts of others
    model = sentencepiece.SentencePieceProcessor(
        model_file=str(corpus / "pieces/sentencepiece.model")
    )
    assert sorted(symbols) == sorted(model.id_to_piece(list(range(1, PIECES))))
    words = (corpus / "pieces/train.txt").read_text(encoding="utf-8").split()
    counts = [words.count(symbol) for symbol in symbols]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 0


def test_what_units_cannot_cover_is_refused(library, tmp_path, prepare):
    assert refused(prepare("python_source", "--pieces", 20), "--pieces is 20, which")
    assert refused(prepare("python_source", "--held-out", 5), "give --packages")
    (library / "m000.py").write_text("# the only file with most characters, without them\n")
    (library / "m019.py").write_text("x = '~'\n")
    assert refused(prepare("python_source", "--pieces", 60), "tokens are <unk>")
    assert not list(tmp_path.glob("out*"))


# a module with every character
ALL_SOURCE = f"every = 1  # {ALL_CHARACTERS}\n"
# a wheel for each part
FILES = {
    # licence notices are left out, comments further down are not
    "train": {
        "one/a.py": "# Licence\n\n# of the file\nimport one_of_many_more\n# why\n",
        "one/b.py": "def function_of_b():\n    return 'a line that others copy'",
        "one/copy_of_b.py": "def function_of_b():\n    return 'a line that others copy'\n",
        "one/tests/test_a.py": "x = 'left_out'\n",
        "one/data_pb2.py": "x = 'left_out'\n",
        "one/generated.py": "# Automatically generated from a schema\nx = 'left_out'\n",
        "one/table.py": f"left_out = '{'a' * 48} {'0' * 52}'\n",
        "one/no_table.py": f"no_table = '{'a' * 58} {'0' * 42}'\n",
        "one/long_line.py": f"LEFT_OUT = '{'left out ' * 50}'\n",
        "one/long_file.py": "x = 'left_out'\n" * 20_000,
        "one/accent.py": "x = 'left_out \u00e9'\n",
        "one/only_notice.py": "# left_out\n",
    },
    # shares half of its long lines with one/b.py: not yet a near copy
    "valid": {
        "two/a.py": "    return 'a line that others copy'\n    return 'a line of its own'\n",
        # shares all but one of its long lines
        "two/b.py": "def function_of_b():\n    return 'a line that others copy'\n    # its own\n",
    },
    "test": {"three/a.py": "import three_of_them\n"},
}


def add_wheel(folder, name, files):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Name: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    return f"{name}==1.0 {name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Return a function that writes wheels of parts, with FILES or others, and a list of them."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))

    def write(*parts, **files):
        lines = [add_wheel(tmp_path, part, files.get(part, FILES[part])) for part in parts]
        (tmp_path / "list.txt").write_text("# a comment\n\n" + "".join(lines))
        return tmp_path / "list.txt"

    return write


def test_a_list_of_packages_gives_parts_without_copies_and_generated_files(
    packages, tmp_path, prepare
):
    # training comes first, wherever it is in the list
    listed = packages("test", "valid", "train", train={**FILES["train"], "one/all.py": ALL_SOURCE})
    train = FILES["train"]
    options = ("--packages", listed, "--pieces", PIECES, "--workers", 1)
    assert prepare("python_source", *options)[0] == 0
    assert {path.stem: path.read_text() for path in (tmp_path / "out/text").iterdir()} == {
        "train": "import one_of_many_more\n# why\n"
        + ALL_SOURCE
        + train["one/copy_of_b.py"]
        + train["one/no_table.py"],
        "valid": FILES["valid"]["two/a.py"],
        "test": "import three_of_them\n",
    }
    # the same folder, but with another split
    expected = "was prepared with another --held-out (None, now 1)"
    assert refused(prepare("python_source", *options, "--held-out", 1), expected)


def test_packages_that_changed_and_unknown_parts_are_refused(packages, tmp_path):
    listed = packages("train", "test")
    add_wheel(tmp_path, "train", {"other.py": "x = 'another wheel of this version'\n"})
    with pytest.raises(ValueError, match=r"(?s)pip could not download .*train"):
        get_packages(listed, tmp_path / "others")
    listed.write_text(listed.read_text().replace(" test ", " tset "))
    with pytest.raises(ValueError, match=r"has the line 'test==1.0 tset .*one of train, valid"):
        get_packages(listed, tmp_path / "others")


def test_held_out_files_are_of_the_training_packages(packages, tmp_path, prepare):
    def numbered(first, number):
        return "".join(f"number_of_this_line = {i}\n" for i in range(first, first + number))

    trained = {f"m{i:03}.py": numbered(100 * i, 1 + i) + ALL_SOURCE for i in range(40)}
    listed = packages("test", "valid", "train", train=trained)
    options = ("--packages", listed, "--pieces", PIECES, "--workers", 1)
    assert refused(prepare("python_source", *options, "--held-out", 20), "--held-out 20")
    assert prepare("python_source", *options, "--held-out", 3)[0] == 0
    parts = {path.stem: path.read_text() for path in (tmp_path / "out/text").iterdir()}
    # in the order of the list
    assert parts.pop("test1") == "import three_of_them\n" + "".join(FILES["valid"].values())
    assert {part: text.count(ALL_SOURCE) for part, text in parts.items()} == {
        "train": 34,
        "valid": 3,
        "test": 3,
    }
    lines = [line for text in parts.values() for line in text.splitlines() if "number_of" in line]
    assert len(set(lines)) == len(lines) == sum(range(1, 41))
    assert sorted(path.stem for path in (tmp_path / "out/bin").glob("*.idx"))[:2] == [
        "test",
        "test1",
    ]


def test_files_with_mostly_lines_of_training_files_are_not_held_out():
    lines = [f"number_of_this_line = {i}" for i in range(20)]
    texts = [
        from_string("mostly copied", "\n".join([*lines[:6], *"abcde" * 9]), "valid"),
        from_string(
            "half copied", "\n".join([*lines[:6], *(line * 2 for line in lines[:6])]), "test"
        ),
        from_string("training", "\n".join(lines), "train"),
    ]
    options = Namespace(packages="list.txt", held_out=None, source_lang=None, target_lang=None)
    parts = _split.split({}, texts, options, None)
    assert [text.name for sides in parts.values() for text in sides["txt"]] == [
        "training",
        "half copied",
    ]
