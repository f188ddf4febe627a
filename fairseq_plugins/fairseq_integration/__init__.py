"""What works around fairseq, for all rooms: it uses none of them.

Presets, errors and safe loading for the commands; precision, optimizers and forward passes for the
layers.
"""

from fairseq_plugins.fairseq_integration.forward_passes import InferenceCache, is_recomputed
from fairseq_plugins.fairseq_integration.installed import HAS_FAIRSEQ, refuse_without_fairseq
from fairseq_plugins.fairseq_integration.optimizers import (
    AmpScaledStep,
    UpdateRule,
    adam_options,
    set_update_rule,
    update_rule,
)
from fairseq_plugins.fairseq_integration.option_names import errors_name_options
from fairseq_plugins.fairseq_integration.precision import SinglePrecision

if HAS_FAIRSEQ:
    from fairseq_plugins.fairseq_integration.constraints import apply_constraints
    from fairseq_plugins.fairseq_integration.presets import register_presets
    from fairseq_plugins.fairseq_integration.safe_loading import allow_option_containers
else:
    __getattr__ = refuse_without_fairseq(__name__)

__all__ = [
    "AmpScaledStep",
    "InferenceCache",
    "SinglePrecision",
    "UpdateRule",
    "adam_options",
    "allow_option_containers",
    "apply_constraints",
    "errors_name_options",
    "is_recomputed",
    "register_presets",
    "set_update_rule",
    "update_rule",
]
