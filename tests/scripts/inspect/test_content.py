"""The page scores the symbols of a text, of a file or of sentences, as the model does."""

import pytest

from fairseq_plugins import load
from scripts.inspect._content import describe_model
from tests.scripts.evaluate.saved_memory_models import write_all
from tests.scripts.evaluate.saved_models import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_all(tmp_path_factory.mktemp("models"))
    write_checkpoint(folder / "recurrent.pt", "transformer_xl", mem_len=5)
    return folder


@pytest.mark.parametrize(
    ("content", "tokens", "read"),
    [
        ("abc\nd\n\n", 40, "abc\nd\n\n"),
        ("abc", 40, "abc"),
        ("\ufeffab\r\nc\r\n", 40, "ab\nc\n"),
        # more than is read at once
        ("abc\n" * 90, 9, "abc\nabc\na"),
        ("abcd" * 90, 9, "abcdabcda"),
        ("\n" * 30 + "a", 31, "\n" * 30 + "a"),
    ],
)
def test_every_symbol_of_a_file_is_scored(folder, tmp_path, content, tokens, read):
    path = tmp_path / "text"
    path.write_bytes(content.encode())
    pair, data = (None, None), folder / "text"
    page = describe_model(folder / "recurrent.pt", data, path, pair, "test", tokens)
    facts = dict(page["facts"])
    score = load(folder / "recurrent.pt", data).score(read)
    assert facts["text"] == f"{len(score)} tokens of text"
    assert facts["loss of this text"] == f"{score.loss:.3f} bits per character"


def test_sentences_are_read_as_the_model_reads_them(folder):
    model, pair = load(folder / "pairs.pt", folder / "pairs"), ("a\u2028 b\n", "\tc d\r\n")
    page = describe_model(folder / "pairs.pt", folder / "pairs", None, pair, "test", 40)
    assert page["source"] == ["a ", "b ", "\n"]
    score = model.score("a b", "c d")
    assert dict(page["facts"])["loss of this text"] == f"perplexity {score.loss:,.2f}"
    assert dict(page["facts"])["text"] == "3 tokens of --target"


def test_a_file_without_text_is_refused(folder, tmp_path):
    (tmp_path / "text").write_text("")
    page = folder / "recurrent.pt", folder / "text", tmp_path / "text", (None, None)
    with pytest.raises(ValueError, match=r"^--text .*text is empty: name a file with text"):
        describe_model(*page, "test", 9)
