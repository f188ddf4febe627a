"""Random models of each kind, converted to Hugging Face's format and back."""

import importlib
from types import SimpleNamespace

import pytest

from fairseq_plugins import load
from tests import tiny
from tests.scripts.evaluate.saved_models import write_checkpoint, write_text

TIED = {"share_decoder_input_output_embed": True, "output_bias": True}
UNTIED = dict.fromkeys(("tie_adaptive_weights", "tie_adaptive_proj"), False)
FULL_WIDTH = {"adaptive_input_factor": 1, "adaptive_softmax_factor": 1}
KINDS = {
    "tied": ("transformer_xl", {"mem_len": 5, **TIED}),
    "pre_norm": ("transformer_xl", {"mem_len": 5, "decoder_normalize_before": True}),
    "zeros": ("transformer_xl", {"mem_len": 5, "same_length": True, "zero_past": True}),
    "shaw": ("transformer_xl", {"mem_len": 5, "clamp_len": 4, "positions": "shaw"}),
    "forgetful": ("transformer_xl", {"mem_len": 0}),
    "places": ("transformer_xl", {"mem_len": 0, "positions": "sinusoidal-absolute"}),
    "full_width": (
        "transformer_xl",
        {"mem_len": 5, **tiny.ADAPTIVE, **FULL_WIDTH, "output_bias": True},
    ),
    "bands": ("transformer_xl", {"mem_len": 5, **tiny.ADAPTIVE, **UNTIED, "untie_r": True}),
    "spans": ("all_attention_lm", {"adaptive_span": True, "span_init": 0.4, **TIED}),
    "half_tied": (
        "all_attention_lm",
        {**tiny.ADAPTIVE, "tie_adaptive_proj": False, "output_bias": True},
    ),
    "tied_head": (
        "all_attention_lm",
        {**tiny.ADAPTIVE, "tie_adaptive_head_proj": True, "output_bias": True},
    ),
}
RECURRENT = [kind for kind in KINDS if kind not in ("forgetful", "places")]


@pytest.fixture(scope="session")
def converted(tmp_path_factory):
    """Return a function that converts a kind of model, there and back; it does so once."""
    transformers = pytest.importorskip("transformers", reason="pip install '.[huggingface]'")
    from scripts.convert import huggingface

    importlib.import_module("fairseq_plugins.huggingface")
    folder, done = tmp_path_factory.mktemp("converted"), {}
    write_text(folder / "text")

    def get(kind):
        if kind not in done:
            name, options = KINDS[kind]
            write_checkpoint(folder / f"{kind}.pt", name, **options)
            there, back = folder / kind, folder / f"{kind}_back"
            words = [folder / f"{kind}.pt", there, "--data", folder / "text"]
            assert huggingface.main([*map(str, words)]) == 0
            assert huggingface.main([str(there), str(back)]) == 0
            done[kind] = SimpleNamespace(
                folder=there,
                ours=load(folder / f"{kind}.pt", folder / "text"),
                back=load(back),
                tokenizer=transformers.AutoTokenizer.from_pretrained(there),
                load=lambda **more: transformers.AutoModelForCausalLM.from_pretrained(
                    there, **more
                ),
            )
        return done[kind]

    return get
