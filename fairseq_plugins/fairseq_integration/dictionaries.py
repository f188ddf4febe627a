"""The digest of a model's dictionaries in its state.

Another dictionary of the same size would fit the model and give wrong losses.
"""

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from torch import Tensor, nn


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
                    "dictionary of DATA: give the data of its training, or text that was binarized "
                    "with its dict.txt (fairseq-preprocess --srcdict, --tgtdict); to train anew, "
                    "give another --save-dir"
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
