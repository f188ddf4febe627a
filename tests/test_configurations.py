"""The YAML of a recipe sets the same options as its command."""

import dataclasses

import fairseq.models
import pytest
from fairseq import options
from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import fairseq_plugins  # noqa: F401 (registers what the recipes name)
from scripts.docs.tables import parse
from tests.recipes import EXAMPLES, HYDRA, PAPERS, words

pytestmark = pytest.mark.filterwarnings(HYDRA, "ignore:[\\s\\S]*version_base:UserWarning")

CONFIGURATIONS = sorted(EXAMPLES.glob("*/config/*.yaml"))
# paths that the command line gives
PLACES = {"data": "DATA/bin", "save_dir": "CHECKPOINTS", "user_dir": None, "log_file": None}


def composed(path):
    """Return the configuration that fairseq-hydra-train composes from a YAML file."""
    hydra_init(path.stem)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(path.parent)):
        places = [f"task.data={PLACES['data']}", f"checkpoint.save_dir={PLACES['save_dir']}"]
        cfg = compose(path.stem, overrides=places)
    add_defaults(cfg)
    return cfg


def values(cfg, group):
    """Return the resolved options of a group, with fixed paths."""
    found = OmegaConf.to_container(cfg, resolve=True, enum_to_str=True).get(group)
    return found and {**found, **{name: PLACES[name] for name in PLACES if name in found}}


def built_from(cfg, monkeypatch):
    """Return the options that a model is built from."""
    name = getattr(cfg.model, "_name", None) or cfg.model.arch
    monkeypatch.setattr(
        ARCH_MODEL_REGISTRY[name], "build_model", classmethod(lambda cls, model, task: model)
    )
    model = fairseq.models.build_model(cfg.model, task=None)
    if OmegaConf.is_config(model):
        return OmegaConf.to_container(model, resolve=True, enum_to_str=True)
    parser = options.get_training_parser()
    ARCH_MODEL_REGISTRY[name].add_args(parser.add_argument_group("model"))
    (group,) = (group for group in parser._action_groups if group.title == "model")
    found = {each.dest: getattr(model, each.dest, None) for each in group._group_actions}
    # fairseq's transformer fills in missing values like this
    for side in ("source", "target"):
        found[f"max_{side}_positions"] = found[f"max_{side}_positions"] or 1024
    return found


def test_every_paper_has_one():
    assert sorted(path.parts[-3] for path in CONFIGURATIONS) == sorted(PAPERS)


@pytest.mark.parametrize("path", CONFIGURATIONS, ids=lambda path: f"{path.parts[-3]}/{path.stem}")
def test_it_says_what_the_command_does(path, monkeypatch):
    given = parse(words(path.parts[-3], path.stem, "train"))
    expected, found = convert_namespace_to_omegaconf(given), composed(path)
    groups = {option.name for option in dataclasses.fields(FairseqConfig)}
    # fairseq-train adds "scoring", which training does not use
    for group in sorted(groups - {"_name", "model", "scoring"}):
        assert values(found, group) == values(expected, group), group
    assert built_from(found, monkeypatch) == built_from(expected, monkeypatch)
