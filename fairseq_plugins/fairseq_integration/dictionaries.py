"""The digest of a model's dictionaries in its state, and the share of ``<unk>`` in a text.

Another dictionary of the same size would fit the model and give wrong losses.
"""

import hashlib
import logging
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# Losses on a text with more <unk> than this share say little.
_MOST_UNKNOWN = 0.01
# tokens that are compared at once
_TOKENS_AT_ONCE = 2**24


class DictionaryDigest(nn.Module):
    """The symbols of a model's dictionaries as numbers; refuses a state of other dictionaries.

    The numbers are below 2**32 in 64 bits, so that the sum of many checkpoints, divided by their
    count, gives them back.
    """

    def __init__(self, dictionaries: Mapping[str, Dictionary]) -> None:
        super().__init__()
        for side, dictionary in dictionaries.items():
            self.register_buffer(side, digest(dictionary))

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *rest: object
    ) -> None:
        """Compare the digests with those of a state, if it has any; torch calls this."""
        for side, expected in self.named_buffers(recurse=False):
            saved = state_dict.get(prefix + side)
            if saved is not None and saved.tolist() != expected.tolist():
                raise ValueError(
                    f"the checkpoint was trained with another dictionary than the {side} "
                    "dictionary of DATA: binarize the text with the dict.txt of its training "
                    "(fairseq-preprocess --srcdict, --tgtdict), or train anew in another --save-dir"
                )


def attach_digest(model: nn.Module, task: FairseqTask) -> None:
    """Let a model refuse checkpoints of other dictionaries than the task's."""
    sides = ("source", "target")
    dictionaries = {side: getattr(task, f"{side}_dictionary", None) for side in sides}
    # --store-ema averages all numbers of a state, except under names with "version"
    model.dictionary_version = DictionaryDigest(
        {side: each for side, each in dictionaries.items() if isinstance(each, Dictionary)}
    )


def digest(dictionary: Dictionary) -> Tensor:
    """Return a hash (8,) of a dictionary's symbols, in their order."""
    hashed = hashlib.sha256("\n".join(dictionary.symbols).encode())
    return torch.tensor(struct.unpack("<8I", hashed.digest()))


def log_unknown(unknown: int, tokens: int, text: str, in_training: float = 1.0) -> None:
    """Log how many tokens of a text are ``<unk>``; warn if :func:`are_many`.

    ``in_training`` is their share in the training part.
    """
    share = f"{text}: {100 * unknown / max(tokens, 1):.1f} % of {tokens:,} tokens are <unk>"
    if not are_many(unknown, tokens):
        logger.info(share)
    elif in_training < unknown / tokens / 10:
        logger.warning(
            "%s, and %.2f %% in training: the model cannot predict what it did not see, so this "
            "loss is mostly theirs; prepare the data with a threshold or in subwords",
            share,
            100 * in_training,
        )
    else:
        easy = "<unk> is easy to predict, so do not compare this loss with others on this text"
        logger.warning("%s: %s", share, easy)


def are_many(unknown: int, tokens: int) -> bool:
    """Return whether more tokens are ``<unk>`` than a loss can ignore: 1 %."""
    return unknown > _MOST_UNKNOWN * tokens


def count_symbol(tokens: np.ndarray, symbol: int) -> int:
    """Return how often a symbol occurs in tokens (N,), which may be more than memory holds."""
    pieces = (tokens[i : i + _TOKENS_AT_ONCE] for i in range(0, len(tokens), _TOKENS_AT_ONCE))
    return sum(int(np.count_nonzero(piece == symbol)) for piece in pieces)
