"""Compose fairseq's configuration quickly: Hydra takes most of the time of a short command.

For each command, Hydra composes everything anew, parses about three hundred values, most of them
the same each time, keeps a list of them that fairseq drops, and reads the source of its callers.
tests/scripts/test_recipe.py compares the result with Hydra's own.
"""

import copy
import functools
import sys

import fairseq.dataclass.utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf


@functools.cache
def without_overrides(name):
    """Compose a configuration without overrides."""
    return compose_with_hydra(name, [], strict=False)


@functools.cache
def parsed_once(override):
    """Parse an override as Hydra does."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


def compose(name, overrides, strict):
    """Replace Hydra's function of this name: insert the chosen groups, then apply the values."""
    config, values = copy.deepcopy(without_overrides(name)), []
    OmegaConf.set_struct(config, True)
    for override in map(parsed_once, overrides):
        group = override.key_or_group
        if "." in group:
            values.append(override)
        else:
            config[group] = ConfigStore.instance().load(f"{group}/{override.value()}.yaml").node
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    OmegaConf.set_struct(config, strict)
    return config


compose_with_hydra = fairseq.dataclass.utils.compose
fairseq.dataclass.utils.compose = compose
_CALLER = (fairseq.dataclass.utils.__file__, None)
sys.modules["hydra.initialize"].detect_calling_file_or_module_from_stack_frame = lambda _: _CALLER
