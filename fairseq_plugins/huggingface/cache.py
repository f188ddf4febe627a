"""The past of a batch as a cache for ``generate``: beams reorder it, rows may have padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from fairseq_plugins.segment_language_model.past import Past

# the name of a cache in calls and outputs; releases of transformers differ
FIELDS = CausalLMOutputWithPast.__dataclass_fields__
CACHE_NAME = "cache" if "cache" in FIELDS else "past_key_values"


@dataclass(frozen=True)
class Group:
    """The ``rows`` (n,) of a batch with as much ``padding`` on the left, and their past."""

    rows: Tensor
    padding: int
    past: Past | None = None


class SegmentCache:
    """What a model keeps of the B rows of a batch: ``cache``, or ``past_key_values``, in a call.

    A past has no gaps, so rows with as much padding are read together, and others by themselves.
    """

    # for ``generate``: the cache grows, goes on from its end only, and holds keys of tokens
    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
        rows = torch.arange(len(input_ids), device=input_ids.device)
        self.groups = [Group(rows, 0)]
        self.length = 0
        self.ends_in_padding = False
        if attention_mask is None or bool(attention_mask.all()):
            return
        mask = attention_mask.bool()
        if (
            mask.shape != input_ids.shape
            or ((mask[:, 1:] > mask[:, :-1]).sum(1) + mask[:, 0] != 1).any()
        ):
            raise ValueError(
                f"attention_mask has the shape {tuple(mask.shape)} for input_ids of "
                f"{tuple(input_ids.shape)}, or gaps: padding can only be on the left or right of a "
                "row's tokens, so give no mask, or one as the tokenizer makes it"
            )
        padding = mask.long().argmax(1)
        self.groups = [Group(rows[padding == n], n) for n in padding.unique().tolist()]
        self.ends_in_padding = not bool(mask[:, -1].all())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens read so far, with padding."""
        return self.length

    def reorder_cache(self, order: Tensor) -> None:
        """Make row ``order[i]`` row i, as beam search asks; ``order`` is (B,)."""
        groups = []
        for group in self.groups:
            rows, places = (order.unsqueeze(1) == group.rows).nonzero().unbind(1)
            past = None if group.past is None else group.past.select(places)
            groups.append(Group(rows, group.padding, past))
        self.groups = groups
