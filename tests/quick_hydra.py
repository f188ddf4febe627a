"""What Hydra computes anew for each of fairseq's commands, computed once: most of a short command.

Hydra composes the whole configuration of fairseq each time, parses the values of some three hundred
options, most of them the same for every command, keeps a list of them that fairseq drops, and reads
the source of all its callers to find out that fairseq calls it.
"""

import copy
import functools
import sys

import fairseq.dataclass.utils
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser


@functools.cache
def without_choices(name):
    """The configuration of a name, with the values that it has by itself."""
    return compose_with_hydra(name, [], strict=False)


@functools.cache
def parsed_once(override):
    """What Hydra makes of an override."""
    return OverridesParser.create().parse_override(override)


def compose(name, overrides, strict):
    """Hydra's function: a configuration with the registered choices of groups, then with values."""
    config = copy.deepcopy(without_choices(name))
    chosen = [override for override in overrides if "." not in override.partition("=")[0]]
    for group, _, choice in (override.partition("=") for override in chosen):
        config[group] = ConfigStore.instance().load(f"{group}/{choice}.yaml").node
    values = [parsed_once(override) for override in overrides if override not in chosen]
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


compose_with_hydra = fairseq.dataclass.utils.compose
fairseq.dataclass.utils.compose = compose
_CALLER = (fairseq.dataclass.utils.__file__, None)
sys.modules["hydra.initialize"].detect_calling_file_or_module_from_stack_frame = lambda _: _CALLER
