"""What Hydra computes anew for each of fairseq's commands, computed once: most of a short command.

It copies all configurations that are registered, though it copies each that it loads, too, parses
the values of some three hundred options, most of them the same for every command, and reads the
source of all its callers to find out that fairseq calls it.
"""

import copy
import functools
import sys

import fairseq.dataclass.utils
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser


@functools.cache
def parsed_once(text):
    """What Hydra makes of an override, for a parser that is given none of its own functions."""
    return parse_override(OverridesParser.create(), text, "override")


def parse_rule(parser, text, rule):
    """Hydra's method, but for overrides that it has parsed before."""
    if rule != "override":
        return parse_override(parser, text, rule)
    return copy.copy(parsed_once(text))


parse_override = OverridesParser.parse_rule
OverridesParser.parse_rule = parse_rule
ConfigStore.__deepcopy__ = lambda store, memo: store
_CALLER = (fairseq.dataclass.utils.__file__, None)
sys.modules["hydra.initialize"].detect_calling_file_or_module_from_stack_frame = lambda _: _CALLER
