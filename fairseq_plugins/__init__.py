"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

Importing this package registers its tasks and models with fairseq. ``load`` is for use from Python:
``from fairseq_plugins import load``. Where fairseq is not installed, there are the layers,
:mod:`fairseq_plugins.modules`.
"""

from typing import Any

from fairseq_plugins.fairseq_integration.installed import HAS_FAIRSEQ, refuse_without_fairseq

__all__ = ["load"]

if HAS_FAIRSEQ:
    # each registers its models, tasks, losses and optimizers
    from fairseq_plugins import (
        all_attention,
        product_key_memory,
        segment_language_model,
        transformer_xl,
    )
    from fairseq_plugins.fairseq_integration.checkpoint_files import keep_checkpoints_whole
    from fairseq_plugins.fairseq_integration.presets import apply_presets, keep_bf16_off_tpus
    from fairseq_plugins.fairseq_integration.safe_loading import allow_option_containers
    from fairseq_plugins.fairseq_integration.sentences import tell_errors_in_a_sentence
    from fairseq_plugins.weighted_transformer import model, optimizer

    allow_option_containers()
    apply_presets()
    keep_bf16_off_tpus()
    keep_checkpoints_whole()
    tell_errors_in_a_sentence()

    def __getattr__(name: str) -> Any:
        """Return ``load``, which fairseq's commands have no use for, when it is asked for."""
        if name != "load":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from fairseq_plugins.python_interface.loading import load

        return load
else:
    __getattr__ = refuse_without_fairseq(__name__)
