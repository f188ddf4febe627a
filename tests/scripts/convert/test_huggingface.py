"""What cannot be converted to Hugging Face's format is refused."""

import json
import re

import pytest

from fairseq_plugins import register
from scripts.convert import huggingface
from tests.product_key_memory.tiny import MEMORY
from tests.scripts.evaluate.saved_models import write_checkpoint, write_text
from tests.scripts.refusals import refused

register()
pytest.importorskip("transformers", reason="pip install '.[huggingface]'")


@pytest.mark.parametrize(
    ("options", "units", "message"),
    [
        (
            {"memory_layers": "2", **MEMORY},
            {"unit": "characters"},
            "CHECKPOINT .*model.pt is a transformer_xl model with product-key memories: only ",
        ),
        ({}, {"unit": "subwords", "bpe": "fastbpe"}, "the data has units of fastbpe .*: only "),
    ],
)
def test_a_model_is_refused(options, units, message, tmp_path, call):
    write_text(tmp_path / "data")
    (tmp_path / "data" / "units.json").write_text(json.dumps(units), encoding="utf-8")
    write_checkpoint(tmp_path / "model.pt", "transformer_xl", mem_len=4, **options)
    words = [tmp_path / "model.pt", tmp_path / "output", "--data", tmp_path / "data"]
    result = call(huggingface.main, *words)
    assert refused(result)
    assert re.match(f"error: {message}", result[2])
    assert not list(tmp_path.glob("output*"))


def test_an_output_that_is_there_is_refused(tmp_path, call):
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "file").touch()
    assert refused(call(huggingface.main, tmp_path, tmp_path / "output"), "is there already")
