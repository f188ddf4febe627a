"""What cannot be converted to Hugging Face's format is refused."""

import pytest

from fairseq_plugins import register
from scripts.convert import huggingface
from tests.product_key_memory.tiny import MEMORY
from tests.scripts.evaluate.saved_models import write_checkpoint, write_text
from tests.scripts.refusals import refused

register()
pytest.importorskip("transformers", reason="pip install '.[huggingface]'")
from fairseq_plugins.huggingface import DictionaryTokenizer  # noqa: E402


@pytest.fixture
def convert(tmp_path, call):
    """Check that a checkpoint with these options is refused, and return the error."""

    def run(**options):
        write_text(tmp_path / "data")
        write_checkpoint(tmp_path / "model.pt", "transformer_xl", mem_len=4, **options)
        words = [tmp_path / "model.pt", tmp_path / "output", "--data", tmp_path / "data"]
        result = call(huggingface.main, *words)
        assert refused(result)
        assert not list(tmp_path.glob("output*"))
        return result[2]

    return run


def test_a_model_with_memories_is_refused(convert):
    assert "transformer_xl model with product-key memories: only" in convert(
        memory_layers="2", **MEMORY
    )


def test_a_tokenizer_that_reads_otherwise_is_refused(convert, monkeypatch):
    monkeypatch.setattr(DictionaryTokenizer, "_tokenize", lambda self, text: text.split())
    assert "the tokenizer that units.json describes differs" in convert()


def test_an_output_that_is_there_is_refused(tmp_path, call):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "file").touch()
    assert refused(call(huggingface.main, tmp_path, tmp_path / "output"), "is there already")
