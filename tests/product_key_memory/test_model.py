"""Language and translation models with memories: presets, options that are refused, EMA."""

import copy
from types import SimpleNamespace

import pytest
import torch
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models.ema.ema import EMA

from fairseq_plugins.product_key_memory.model import LANGUAGE_MODELS
from scripts.docs import tables
from tests.product_key_memory.tiny import (
    BUILDERS,
    build,
    memories,
    tiny_language_model,
    tiny_transformer,
)
from tests.recipes import HYDRA


@pytest.mark.filterwarnings(HYDRA)
@pytest.mark.parametrize("arch", LANGUAGE_MODELS)
def test_presets_equal_the_papers_models(arch):
    # section 4.5
    numbers = {"ablation": [5], "tiny": [3]}.get(arch.split("_")[-1], [])
    task = ("--task", "language_modeling", "--tokens-per-sample", "512")
    cfg = convert_namespace_to_omegaconf(tables.parse(["DATA", *task, "--arch", arch]))
    decoder = tables.build(cfg.model, 60_000).decoder
    by_layer = {number: memories(layer) for number, layer in enumerate(decoder.layers, start=1)}
    assert [number for number, there in by_layer.items() if there] == numbers
    for (memory,) in filter(None, by_layer.values()):
        assert (memory.heads, memory.knn) == (4, 8 if "tiny" in arch else 32)
    assert not any(layer.normalize_before for layer in decoder.layers)
    # learned positions, tied embeddings
    assert decoder.embed_positions.weight.requires_grad
    assert decoder.output_projection.weight is decoder.embed_tokens.weight


DECODER = "decoder_memory_layers"


@pytest.mark.parametrize(
    ("build_it", "options", "words"),
    [
        (tiny_language_model, {"memory_layers": "0"}, "--memory-layers is '0': .* from 1 to 3"),
        (tiny_language_model, {"memory_layers": "1,4"}, "--memory-layers is '1,4': .* to 3"),
        (tiny_language_model, {"memory_layers": "3;2"}, "--memory-layers is '3;2': .* such as 6,1"),
        (
            tiny_language_model,
            {"memory_layers": "2", "memory_query_hidden_dims": "8;9"},
            "--memory-query-hidden-dims is '8;9': .* 512,512",
        ),
        (
            tiny_language_model,
            {"memory_layers": "2", "decoder_layers_to_keep": "1"},
            "--decoder-layers-to-keep is 1 with --memory-layers 2: leave one",
        ),
        (tiny_transformer, {DECODER: "1,1"}, "--decoder-memory-layers is '1,1': .* each once"),
    ],
)
def test_models_refuse_impossible_options(build_it, options, words):
    with pytest.raises(ValueError, match=words):
        build_it(**options)


@pytest.mark.parametrize("build_it", [tiny_language_model, tiny_transformer])
def test_memory_options_without_a_memory_cause_a_warning(build_it, caplog):
    build_it(memory_output_gate=True, memory_optimizer=None)
    (warning,) = (text for text in caplog.messages if "memory" in text)
    assert "memory-layers for --memory-slots, " in warning
    assert "--memory-output-gate" in warning


@pytest.mark.parametrize("kind", BUILDERS)
def test_an_average_has_the_hidden_values_and_statistics(kind):
    """fairseq's --store-ema averages by the names of the state, with the decay 0.5 here."""
    model = build(kind, memory_optimizer="adam_with_memory", memory_query_batch_norm=True)
    config = SimpleNamespace(ema_decay=0.5, ema_seed_model=None, ema_fp32=False)
    config.ema_start_update, config.ema_update_freq = 0, 1
    average, expected = EMA(model, config), copy.deepcopy(model.state_dict())
    for _ in range(2):
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected[name].lerp_(value.normal_(), 0.5)
        average.step(model, 1)
    averaged = average.get_model().state_dict()
    tables = [name for name in averaged if name.endswith("values.weight")]
    assert len(tables) == len(memories(model))
    for name, value in averaged.items():
        # fairseq averages a tied parameter once for each of its names, and no version
        tied = sum(value.data_ptr() == other.data_ptr() for other in averaged.values()) > 1
        if value.is_floating_point() and not tied and "version" not in name:
            torch.testing.assert_close(value, expected[name])
        assert name not in tables or not torch.equal(value, model.state_dict()[name])
