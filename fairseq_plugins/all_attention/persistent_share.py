"""How much attention goes to persistent vectors, in the log of validation.

Shapes: B streams, T tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairseq.logging import metrics
from torch import Tensor, nn

from fairseq_plugins.all_attention.attention import AllAttention
from fairseq_plugins.fairseq_integration.forward_passes import AFTER_THE_LOSS, validation_pass

# Names that begin so are summed and not printed.
_SHARE, _TOKENS = "_persistent_share_", "_persistent_tokens"


def watch_persistent_vectors(
    model: nn.Module, attentions: Sequence[AllAttention], padding: int
) -> None:
    """Have validation log what part of their attention the layers give to persistent vectors.

    ``persistent_share_L`` is that of layer L (from 1) in percent, in the mean over the heads and
    over all tokens that were read; with several workers, of the first one's streams. Training,
    evaluation and generation log nothing.

    Args:
        model: whose forward passes are watched.
        attentions: of its layers, in which persistent vectors and context share one softmax.
        padding: the symbol that does not count.
    """
    if attentions:
        _Watch(model, attentions, padding)


class _Watch:
    """Collects the shares of a forward pass; the model's hooks hold it."""

    def __init__(self, model: nn.Module, attentions: Sequence[AllAttention], padding: int) -> None:
        self.attentions = list(attentions)
        self.padding = padding
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _before(self, model: nn.Module, inputs: tuple) -> None:
        if validation_pass(model) is not None:
            self._hand_out([])

    def _after(self, model: nn.Module, inputs: tuple, named: dict[str, Any], output: Any) -> None:
        shares = self.attentions[0].persistent_shares
        self._hand_out(None)
        # an error may have ended the pass in any layer
        if not shares or len(shares) < len(self.attentions):
            return
        tokens = inputs[0] if inputs else named["src_tokens"]
        self._log(shares, tokens.ne(self.padding))

    def _hand_out(self, shares: list[Tensor] | None) -> None:
        for attention in self.attentions:
            attention.persistent_shares = shares

    def _log(self, shares: list[Tensor], read: Tensor) -> None:
        """Add shares of tokens (B, T) that are true in ``read``, without waiting for a GPU."""
        metrics.log_scalar_sum(_TOKENS, read.sum())
        for number, share in enumerate(shares, start=1):
            name = f"{_SHARE}{number}"
            metrics.log_scalar_sum(name, (share * read).sum())
            metrics.log_derived(
                f"persistent_share_{number}",
                lambda meters, name=name: round(
                    100 * float(meters[name].sum / meters[_TOKENS].sum), 1
                ),
                AFTER_THE_LOSS,
            )
