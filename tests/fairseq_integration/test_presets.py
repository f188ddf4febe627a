"""Presets: what --arch sets on fairseq's command line, and in the options of saved models."""

import importlib.util
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Optional

import fairseq.models
import pytest
from fairseq import options
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import BaseFairseqModel, register_model
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fairseq_plugins.fairseq_integration.presets import register_presets
from tests.recipes import HYDRA

pytestmark = pytest.mark.filterwarnings(HYDRA)

PRESETS = {"made_up_large": {"width": 64, "depth": 24}}
REGISTRIES = [
    fairseq.models.MODEL_REGISTRY,
    fairseq.models.MODEL_DATACLASS_REGISTRY,
    fairseq.models.ARCH_MODEL_REGISTRY,
    fairseq.models.ARCH_MODEL_NAME_REGISTRY,
    fairseq.models.ARCH_MODEL_INV_REGISTRY,
    fairseq.models.ARCH_CONFIG_REGISTRY,
    ConfigStore.instance().repo["model"],
]


@dataclass
class Options(FairseqDataclass):
    width: int = 8
    depth: int = 2
    span: Optional[int] = None


class Model(BaseFairseqModel):
    @classmethod
    def build_model(cls, cfg, task):
        built = cls()
        built.cfg = cfg
        return built


@pytest.fixture(autouse=True)
def made_up():
    """Register a model and its presets during a test."""
    saved = [dict(registry) for registry in REGISTRIES]
    register_model("made_up", dataclass=Options)(Model)
    register_presets("made_up", PRESETS)
    yield
    for registry, before in zip(REGISTRIES, saved, strict=True):
        registry.clear()
        registry.update(before)


def parse(*words):
    """Return the model's options as fairseq-train reads them."""
    parsed = options.parse_args_and_arch(options.get_training_parser(), ["data", *words])
    return convert_namespace_to_omegaconf(parsed).model


def values(cfg):
    return [getattr(cfg, name, None) for name in ("width", "depth", "span")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--arch made_up", [8, 2, None]),
        # values on the command line stay, even if they equal the default
        ("--arch made_up_large --depth 3 --span 5", [64, 3, 5]),
        ("--arch made_up_large --width 8 --depth 2", [8, 2, None]),
    ],
)
def test_a_preset_sets_what_the_command_line_leaves_open(words, expected):
    cfg = parse(*words.split())
    assert values(cfg) == expected
    model = fairseq.models.build_model(cfg, task=None)
    assert values(model.cfg) == values(cfg)


@pytest.mark.parametrize(("task", "refused"), [("translation", True), ("language_modeling", False)])
def test_arch_checks_the_tasks_class(task, refused):
    def check(kind):
        if kind.__name__ == "TranslationTask":
            raise ValueError(f"the task is {kind.__name__}")

    register_presets("made_up", {"made_up_wide": {"width": 99}}, check)
    for name in ("made_up", "made_up_wide"):
        raised = pytest.raises(ValueError, match=r"^the task is TranslationTask$")
        with raised if refused else nullcontext():
            parse("--task", task, "--arch", name)


def test_hydra_has_the_same_presets():
    # as fairseq-hydra-train completes a configuration after importing the plugin
    cfg = OmegaConf.create({"model": {"_name": "made_up_large", "depth": 2, "span": 5}})
    add_defaults(cfg)
    OmegaConf.set_struct(cfg, True)
    # the checkpoint has the same values
    saved = OmegaConf.create(OmegaConf.to_container(cfg.model))
    for chosen, loaded in ((cfg.model, False), (saved, True)):
        built = fairseq.models.build_model(chosen, task=None, from_checkpoint=loaded)
        assert values(built.cfg) == [64, 2, 5]


@pytest.mark.parametrize(
    ("name", "words", "unset"),
    [
        ("made_up_large", "--memory-efficient-bf16", True),
        # fairseq's own models are left alone
        ("transformer", "--bf16", False),
    ],
)
def test_bf16_sets_tpu_only_where_there_may_be_one(monkeypatch, name, words, unset):
    def tpu():
        line = ["data", "--arch", name, words]
        return options.parse_args_and_arch(options.get_training_parser(), line).tpu

    assert tpu() != unset
    find = importlib.util.find_spec
    there = {"torch_xla": find("torch")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there.get(name) or find(name))
    assert tpu()
