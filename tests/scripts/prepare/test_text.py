"""Users' own texts as characters, words or subwords."""

import gzip
import random
import shutil

import pytest
from sacremoses import MosesDetokenizer

from fairseq_plugins.units import read_units
from tests.scripts.prepare.prepared import SPLITS, contents, lines, read_json, write_files
from tests.scripts.refusals import refused

LINES = [f"Line {number}, the old farmer's hat & coat." for number in range(40)]


@pytest.fixture
def prepare(prepare):
    return lambda *words: prepare("text", "--workers", 1, *words)


def written(folder, split, stage="tokens"):
    return (folder / stage / f"{split}.txt").read_text(encoding="utf-8").split("\n")[:-1]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def test_characters_come_back_whatever_blanks_and_line_ends_there_are(prepare, tmp_path):
    # a no-break space, an ideographic space, a tab, the symbol for a space, a lone carriage return
    odd = "</s> \u00fcber\u00a0alles \u3000\t\u2581 \u2028x\ry  "
    path = tmp_path / "text.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([odd, "", *LINES, odd, "c", "a b"]).encode())
    assert prepare("--input", path, "--unit", "characters", "--held-out", 1)[0] == 0
    out = tmp_path / "out"
    units = read_json(out / "bin" / "units.json")
    assert units["unit"] == "characters"
    symbols = {name: character for character, name in units["symbols"].items()}
    texts = {
        split: [
            "".join(symbols.get(character, character) for character in line.split(" ")[:-1])
            for line in lines(out / "bin", split)
        ]
        for split in SPLITS
    }
    assert texts == {"train": [odd, "", *LINES, odd], "valid": ["c"], "test": ["a b"]}
    sizes = read_json(out / "preparation.json")["splits"]["train"]
    assert sizes["characters"] == sizes["tokens"] == sum(len(line) + 1 for line in texts["train"])
    assert sizes.keys().isdisjoint(("words", "tokens_per_word"))


@pytest.mark.parametrize("unit", ["words", "subwords"])
@pytest.mark.parametrize("tokenizer", [None, "moses"])
def test_words_and_subwords_of_one_text(prepare, source, tmp_path, unit, tokenizer):
    options = ("--moses", "en") if tokenizer else ()
    options += ("--bpe-size", 30) if unit == "subwords" else ()
    status, _, error = prepare("--input", source, "--held-out", 3, "--unit", unit, *options)
    assert (status, error) == (0, "")
    out = tmp_path / "out"
    units = read_json(out / "bin" / "units.json")
    assert (units["unit"], units["tokenizer"]) == (unit, tokenizer)
    assert units["moses_no_dash_splits"] == (tokenizer is not None)
    sizes = read_json(out / "preparation.json")["splits"]
    last = "tokens" if unit == "words" else "bpe"
    assert unit == "words" or (out / "bin" / units["model"]).resolve() == out / "bpe" / "codes"
    detokenizer = MosesDetokenizer(lang="en")
    parts = zip(SPLITS, (LINES[:34], LINES[34:37], LINES[37:]), strict=True)
    for split, expected in parts:
        items, words = lines(out / "bin", split), written(out, split)
        binarized = written(out, split, last)
        assert [line.replace("@@ ", "") for line in binarized] == words
        back = detokenizer.detokenize if tokenizer else " ".join
        assert [back(line.split()) for line in words] == expected
        assert split != "train" or items == [f"{line} </s>" for line in binarized]
        size = sizes[split]
        assert size["words"] == len(" ".join(words).split())
        assert size["tokens"] == len(" ".join(items).split())
        assert size["unknown"] == " ".join(items).count("<unk>")
        rate = size["tokens"] / (size["words"] + len(words))
        assert size["tokens_per_word"] == pytest.approx(rate)
    # training lacks the numbers in test
    assert (sizes["test"]["unknown"] > 0) == (unit == "words")


def test_documents_are_whole_in_order_and_in_one_part(prepare, tmp_path):
    folder = tmp_path / "documents"
    for number in range(20):
        name = f"{number % 3}/d{number:02}.txt{'.gz' * (number % 2)}"
        write_files(folder, {name: f"first {number}\n\nlast {number}"})
    words = ("--input", folder, "--held-out", 4, "--unit", "words")
    assert prepare(*words)[0] == 0
    names = sorted(range(20), key=lambda number: (number % 3, number))
    drawn = random.Random(1).sample(range(20), 8)
    indices = {"valid": drawn[:4], "test": drawn[4:]}
    indices["train"] = [index for index in range(20) if index not in drawn]
    for split, chosen in indices.items():
        documents = [names[index] for index in sorted(chosen)]
        expected = "\n\n".join(f"first {number}\n\nlast {number}" for number in documents)
        assert written(tmp_path / "out", split) == expected.split("\n")
    assert prepare(*words, "--output", tmp_path / "same")[0] == 0
    assert contents(tmp_path / "same") == contents(tmp_path / "out")


def test_three_parts_rare_words_and_punctuation_marks(prepare, tmp_path):
    folder = tmp_path / "parts"
    files = {"train.txt": "a b\n\nb a\n", "valid.txt.gz": "a c <unk>\n", "test.txt": "b"}
    write_files(folder, files)
    words = ("--input", folder, "--unit", "words")
    assert prepare(*words)[0] == 0
    train, valid, test = (lines(tmp_path / "out/bin", split) for split in SPLITS)
    assert train == ["a b </s>", "</s>", "b a </s>"]
    assert (valid, test) == (["a <unk> <unk> </s>"], ["b </s>"])
    (folder / "train.txt").write_text("a b\n\nb a a d\n")
    assert prepare(*words, "--threshold", 3, "--output", tmp_path / "frequent")[0] == 0
    train = lines(tmp_path / "frequent" / "bin", "train")
    assert train == ["a <unk> </s>", "</s>", "<unk> a a <unk> </s>"]
    write_files(folder, {"train.txt": "(It's _so_ \u2013 na\u00efve!)\n"})
    options = (*words, "--split-punctuation", "--output", tmp_path / "marks")
    assert prepare(*options)[0] == 0
    assert written(tmp_path / "marks", "train") == ["( It ' s _ so _ \u2013 na\u00efve ! )"]
    assert read_units(shutil.copytree(tmp_path / "marks/bin", tmp_path / "copy")).split_punctuation


def test_only_the_files_that_are_read_decide_whether_a_folder_is_complete(prepare, tmp_path):
    files = {f"{split}.txt": "a b\n" for split in SPLITS}
    for name, more in {
        "parts": files,
        "documents": {f"d{n}.txt": "a b\n" for n in range(9)},
    }.items():
        folder = tmp_path / name
        write_files(folder, more)
        out = folder / "out" if name == "parts" else tmp_path / "out"
        words = ("--input", folder, "--unit", "words", "--output", out)
        assert prepare(*words)[0] == 0
        write_files(folder, {f"{next(iter(more))}~": "a backup", "folder.txt.d/x": "no text"})
        (folder / "folder.txt").mkdir()
        status, said, error = prepare(*words)
        assert (status, said, error) == (0, f"{out}: complete\n", "")
        write_files(folder, {next(iter(more)): "b a\n"})
        assert refused(prepare(*words), "was prepared with another --input")


def test_pieces_are_learned_from_long_lines_too_and_indentation_is_no_word(prepare, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n".join([*["    alpha  beta"] * 20, *["gamma delta " * 900] * 20]) + "\n")
    options = ("--input", path, "--unit", "sentencepiece", "--pieces", 300, "--held-out", 1)
    assert prepare(*options)[0] == 0
    assert "\u2581gamma" in (tmp_path / "out" / "bin" / "dict.txt").read_text(encoding="utf-8")
    train = read_json(tmp_path / "out" / "preparation.json")["splits"]["train"]
    assert train["words"] == 20 * 2 + 18 * 1800


def test_codes_and_dictionary_of_a_trained_model(prepare, source, tmp_path):
    words = ("--input", source, "--unit", "subwords")
    assert prepare(*words, "--bpe-size", 20)[0] == 0
    first = tmp_path / "out"
    source.write_text("another old hat\n" * 20)
    second = tmp_path / "second"
    codes, srcdict = first / "bpe" / "codes", first / "bin" / "dict.txt"
    assert prepare(*words, "--bpe-codes", codes, "--srcdict", srcdict, "--output", second)[0] == 0
    assert (second / "bpe" / "codes").read_bytes() == codes.read_bytes()
    assert (second / "bin" / "dict.txt").read_bytes() == srcdict.read_bytes()
    assert written(second, "train", "bpe")[0].replace("@@ ", "") == "another old hat"


def test_a_dictionary_may_have_another_symbol_for_the_space_but_not_for_the_rest(
    prepare, source, tmp_path
):
    words = ("--input", source, "--unit", "characters", "--srcdict", tmp_path / "dict.txt")
    symbols = sorted({*"".join(LINES), "_"} - {" "})
    write_files(tmp_path, {"dict.txt": "".join(f"{symbol} 1\n" for symbol in symbols)})
    status, said, _ = prepare(*words)
    assert status == 0
    assert "warning" not in said
    out = tmp_path / "out"
    assert read_json(out / "bin" / "units.json")["symbols"][" "] == "_"
    assert "<unk>" not in "".join(lines(out / "bin", "train"))
    write_files(tmp_path, {"dict.txt": "".join(f"{symbol} 1\n" for symbol in symbols[5:])})
    status, said, _ = prepare(*words, "--output", tmp_path / "foreign")
    assert status == 0
    assert "warning" in said


@pytest.mark.parametrize(("unit", "symbol"), [("words", "</s>"), ("subwords", "<unk>")])
def test_a_special_symbol_in_a_text_is_refused_by_name(prepare, tmp_path, unit, symbol):
    path = tmp_path / "text.txt"
    within = "the" if unit == "subwords" else ""
    path.write_text(f"the farmer\n{within}{symbol} farmer\n" * 20)
    size = ("--bpe-size", 9) if unit == "subwords" else ()
    result = prepare("--input", path, "--unit", unit)
    assert refused(result, f"{path}, line 2: {symbol} is a special symbol", "--moses")
    assert not (tmp_path / "out").exists()
    assert prepare("--input", path, "--unit", unit, "--moses", "en", *size)[0] == 0
    assert "&lt;" in written(tmp_path / "out", "train")[1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--unit words --input {}/half", "--input {}/half"),
        ("--unit words --input {}/text.txt --output {}/a,b", "--output {}/a,b has a comma"),
        ("--unit words --input {}/text.txt --held-out 20", "--held-out 20"),
        ("--unit words --input {}/blank.txt", "{}/blank.txt"),
        ("--unit words --input {}/latin.txt", "latin.txt, line 3"),
        ("--unit words --input {}/documents --output {}/documents/x", "--output {}/documents/x"),
        ("--unit words --input {}/parts --held-out 2", "--held-out is 2"),
        ("--unit subwords --input {}/joiner.txt", "train.txt, line 2"),
        ("--unit words --input {}/damaged.txt.gz", "damaged.txt.gz"),
        ("--unit words --input {}/text.txt --moses xx", "--moses is xx"),
        ("--unit words --input {}/text.txt --moses en --split-punctuation", "--split-punctuation"),
        ("--unit characters --input {}/text.txt --moses en", "--moses is for --unit words"),
        (
            "--unit words --input {}/text.txt --bpe-codes {}/text.txt",
            "--bpe-codes is for --unit sub",
        ),
        ("--unit subwords --input {}/text.txt --bpe-codes {}/text.txt", "text.txt"),
        ("--unit subwords --input {}/short.txt", "train.txt"),
    ],
)
def test_prepare_text_refuses_unusable_inputs_and_options(prepare, source, tmp_path, words, named):
    files = {
        **dict.fromkeys(["half/train.txt", *(f"parts/{split}.txt" for split in SPLITS)], "a\n"),
        **{f"documents/{number}.txt": "a\n" for number in range(9)},
        "joiner.txt": "aa aa\nbb@@ c\n" * 9,
        "blank.txt": "a\n" * 9 + "\n \n",
        "latin.txt": b"a\nb\nca\xe9f\n" * 9,
        "short.txt": "a b c\n" * 9,
        "damaged.txt.gz": gzip.compress(b"a b\n" * 999)[:-9],
    }
    write_files(tmp_path, files)
    result = prepare(*words.replace("{}", str(tmp_path)).split())
    assert refused(result, named.format(tmp_path)), result
    assert not list(tmp_path.glob("out*"))
