"""Architectures from four papers for fairseq: ``fairseq-train --user-dir fairseq_plugins …``.

Importing this package registers its tasks and models with fairseq. Where fairseq is not installed,
it has its layers, :mod:`fairseq_plugins.modules`.
"""

from fairseq_plugins.fairseq_integration.installed import HAS_FAIRSEQ

if HAS_FAIRSEQ:
    # each registers its models, tasks, losses and optimizers
    from fairseq_plugins import (
        all_attention,
        product_key_memory,
        segment_language_model,
        transformer_xl,
        weighted_transformer,
    )
    from fairseq_plugins.fairseq_integration.checkpoint_files import keep_checkpoints_whole
    from fairseq_plugins.fairseq_integration.presets import apply_presets, keep_bf16_off_tpus
    from fairseq_plugins.fairseq_integration.safe_loading import allow_option_containers

    allow_option_containers()
    apply_presets()
    keep_bf16_off_tpus()
    keep_checkpoints_whole()
