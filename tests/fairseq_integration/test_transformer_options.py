"""A dataclass of options for models built on fairseq's translation transformer."""

import argparse
from argparse import Namespace

import fairseq.models
import pytest
import torch
from fairseq.models.transformer import TransformerConfig, TransformerModel, base_architecture
from omegaconf import OmegaConf

import fairseq_plugins  # noqa: F401 (registers the models)
from fairseq_plugins.fairseq_integration.transformer_options import TransformerOptions, parsed
from tests import tiny

MODELS = ["weighted_transformer", "pkm_transformer"]
SMALL = {
    **{"encoder_layers": 2, "decoder_layers": 1, "encoder_embed_dim": 16},
    **{"encoder_ffn_embed_dim": 24, "encoder_attention_heads": 2, "decoder_attention_heads": 2},
}


def test_options_equal_those_of_fairseqs_parser():
    parser = argparse.ArgumentParser(add_help=False)
    TransformerModel.add_args(parser)
    known = set(OmegaConf.structured(TransformerOptions)) - {"_name"}
    # decoder_input_dim has no flag
    assert known - {"decoder_input_dim"} == {action.dest for action in parser._actions}
    cfg = OmegaConf.create({"model": TransformerOptions, "task": {"max_source_positions": 7}})
    model = parsed(cfg.model)
    assert (model.max_source_positions, model.max_target_positions) == (7, 1024)


@pytest.mark.parametrize(
    "chosen",
    [
        {"encoder_embed_dim": 64, "decoder_embed_dim": 32, "decoder_output_dim": 8},
        {"dropout": 0.3, "activation_fn": "gelu", "adaptive_softmax_cutoff": [3, 5]},
    ],
)
def test_options_are_completed_like_parsed_ones(chosen):
    cfg = OmegaConf.merge(OmegaConf.structured(TransformerOptions), chosen)
    both = parsed(cfg), Namespace(**chosen)
    for options in both:
        base_architecture(options)
    actual, expected = map(TransformerConfig.from_namespace, both)
    assert actual == expected
    assert OmegaConf.to_yaml(OmegaConf.create(vars(parsed(cfg)))).count("${") == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_is_built_with_pruned_layers(model):
    trained = fairseq.models.build_model(
        OmegaConf.create({"_name": model, **SMALL}), tiny.tiny_task()
    )
    pruning = {"encoder_layers_to_keep": "1", "decoder_layers_to_keep": "0"}
    options = OmegaConf.create({"_name": model, **SMALL, **pruning})
    loaded = fairseq.models.build_model(options, tiny.tiny_task(), from_checkpoint=True)
    loaded.load_state_dict(trained.state_dict(), model_cfg=options)
    assert len(loaded.encoder.layers) == 1
    layer, layers = loaded.encoder.layers[0].state_dict(), trained.encoder.layers
    assert all(torch.equal(layer[name], x) for name, x in layers[1].state_dict().items())


@pytest.mark.parametrize("optimizer", ["adam", "adam_with_memory"])
def test_a_memory_knows_its_optimizer_under_hydra(optimizer):
    model = {"_name": "pkm_transformer", "encoder_memory_layers": "1", **SMALL}
    model |= {"memory_slots": 16, "memory_knn": 2}
    cfg = OmegaConf.create({"model": model, "optimizer": {"_name": optimizer}})
    built = fairseq.models.build_model(cfg.model, tiny.tiny_task())
    (table,) = (w for name, w in built.named_parameters() if name.endswith("values.weight"))
    assert table.requires_grad == (optimizer == "adam")
