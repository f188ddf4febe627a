"""Product-key memories in the layers of a segment language model (``--memory-layers``)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fairseq_plugins.product_key_memory.added_memories import fit_to_memories
from fairseq_plugins.product_key_memory.memory import MemorySublayer, ProductKeyMemory
from fairseq_plugins.product_key_memory.options import (
    INSTEAD,
    PARALLEL,
    MemoryBuilder,
    check_placed,
    parse_memory_layers,
    placement,
)


class MemorySublayers:
    """Gives some layers of a model a memory, as the ``added_sublayers`` of a segment model.

    A memory takes the place of the feed-forward sublayer (section 3.3), comes after it
    (``--memory-interleave``), or stands beside it (``--memory-parallel``).
    """

    def __init__(self, cfg: Any) -> None:
        option = "--memory-layers"
        self._numbers = parse_memory_layers(cfg.memory_layers, cfg.decoder_layers, option)
        check_placed(cfg, bool(self._numbers), option)
        self._cfg = cfg
        self._builder = MemoryBuilder(cfg)

    @property
    def parallel(self) -> bool:
        """Whether a memory adds to the feed-forward sublayer, in place of coming after it."""
        return placement(self._cfg) == PARALLEL

    def place(
        self, number: int, feed_forward: nn.Module | None
    ) -> tuple[nn.Module | None, nn.Module | None]:
        """Return the feed-forward and the added sublayer of layer ``number``, from 1."""
        if number not in self._numbers:
            return feed_forward, None
        if self.parallel and feed_forward is None:
            raise ValueError(
                "--memory-parallel with --decoder-ffn-embed-dim 0: layers have no feed-forward "
                "sublayer to stand beside; leave one of the two out"
            )
        memory = MemorySublayer(self._builder.build(self._cfg.decoder_embed_dim))
        if placement(self._cfg) == INSTEAD:
            return memory, None
        return feed_forward, memory

    def finish(self, model: nn.Module) -> None:
        """Prepare the complete model to be trained with its memories."""
        memories = {
            f"memory{number}": module
            for number, layer in enumerate(model.decoder.layers, start=1)
            for module in layer.modules()
            if isinstance(module, ProductKeyMemory)
        }
        self._builder.finish(model, memories)

    def describe(self) -> str:
        """Return for the log which layers have memories."""
        layers = self._cfg.memory_layers
        return f", product-key memories in layers {layers}" if layers else ""

    @staticmethod
    def fit_weights(model: nn.Module, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's weights with those of memories that it lacks."""
        return fit_to_memories(model, state_dict)
