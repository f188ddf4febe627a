"""Texts that are continued or scored one by one, each a stream of its own.

Shapes: B texts, T tokens.
"""

import numpy as np
import torch
from fairseq.data import (
    Dictionary,
    IdDataset,
    ListDataset,
    NestedDictionaryDataset,
    NumelDataset,
    PadDataset,
)
from torch import Tensor


def prompts(
    dictionary: Dictionary, src_tokens: list[Tensor], src_lengths: list[int]
) -> NestedDictionaryDataset:
    """Return texts, each ended by ``</s>``, as prompts: ``</s>`` moves to the front."""
    eos = torch.tensor([dictionary.eos()])
    source = ListDataset([torch.cat([eos, tokens[:-1]]) for tokens in src_tokens], src_lengths)
    return NestedDictionaryDataset(
        {
            "id": IdDataset(),
            "net_input": {
                "src_tokens": PadDataset(source, pad_idx=dictionary.pad(), left_pad=False),
                "src_lengths": NumelDataset(source),
            },
        },
        sizes=[np.array(src_lengths)],
    )


def sentences(dictionary: Dictionary, src_tokens: Tensor, src_lengths: Tensor) -> Tensor:
    """Return what prompts (B, T) of ``src_lengths`` (B,) are to predict: ``</s>`` moves back."""
    target = torch.full_like(src_tokens, dictionary.pad())
    target[:, :-1] = src_tokens[:, 1:]
    return target.scatter(1, src_lengths.unsqueeze(1) - 1, dictionary.eos())
