"""Presets: what --arch sets on fairseq's command line, and in the options of saved models."""

import importlib.util

import fairseq.models
import pytest
from fairseq import options
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from fairseq_plugins.transformer_xl.model import TransformerXLConfig
from tests import tiny
from tests.recipes import HYDRA

pytestmark = pytest.mark.filterwarnings(HYDRA)

TASK = "segment_language_modeling"
DEFAULT = TransformerXLConfig()
WIDTH, HEADS = DEFAULT.decoder_embed_dim, DEFAULT.decoder_attention_heads


def parse(*words):
    """Return the options as fairseq-train reads them."""
    line = ["data", *words]
    return options.parse_args_and_arch(options.get_training_parser(), line)


def build(cfg, from_checkpoint=False):
    """Build a model from its options; return its numbers of layers and heads, and its width."""
    model = fairseq.models.build_model(cfg, tiny.stream_task(), from_checkpoint)
    layers = model.decoder.network.layers
    width = layers[0].self_attn.q_proj.in_features
    return len(layers), width // layers[0].self_attn.head_dim, width


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("transformer_xl", (DEFAULT.decoder_layers, HEADS, WIDTH)),
        ("transformer_xl_tiny", (4, 4, 128)),
        # values on the command line stay, even if they equal the default
        (
            f"transformer_xl_tiny --decoder-attention-heads {HEADS} --decoder-embed-dim {WIDTH}",
            (4, HEADS, WIDTH),
        ),
    ],
)
def test_a_preset_sets_what_the_command_line_leaves_open(words, expected):
    args = parse("--task", TASK, "--arch", *words.split())
    assert build(convert_namespace_to_omegaconf(args).model) == expected


def test_hydra_has_the_same_presets():
    # as fairseq-hydra-train completes a configuration after importing the plugin
    model = {"_name": "transformer_xl_tiny", "decoder_layers": 2}
    cfg = OmegaConf.create({"model": model, "task": {"_name": TASK}})
    add_defaults(cfg)
    OmegaConf.set_struct(cfg, True)
    assert build(cfg.model) == (2, 4, 128)
    # the checkpoint has the same values
    saved = OmegaConf.create(OmegaConf.to_container(cfg.model, resolve=True))
    assert build(saved, from_checkpoint=True) == (2, 4, 128)


@pytest.mark.parametrize(
    ("words", "unset"),
    [
        (f"--task {TASK} --arch transformer_xl_tiny --bf16", True),
        (f"--task {TASK} --arch transformer_xl --memory-efficient-bf16", True),
        # fairseq's own models are left alone
        ("--arch transformer --bf16", False),
    ],
)
def test_bf16_sets_tpu_only_where_there_may_be_one(monkeypatch, words, unset):
    assert parse(*words.split()).tpu != unset
    find = importlib.util.find_spec
    there = {"torch_xla": find("torch")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there.get(name) or find(name))
    assert parse(*words.split()).tpu
